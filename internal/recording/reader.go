// SPDX-License-Identifier: Apache-2.0

package recording

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/ummu/ummu/internal/symbol"
	"github.com/ummu/ummu/mm"
)

func countLines(b []byte) int { return bytes.Count(b, []byte{'\n'}) }

// Reader reads a stream from a recording or from plain NDJSON. What a file
// declares about itself never makes it use more than a few MiB. It is not safe
// for concurrent use.
type Reader struct {
	meta    *Meta
	summary *Summary
	dec     *Decoder
	blocks  *blockReader  // a recording
	text    *bufio.Reader // or NDJSON
	rest    []byte        // lines of the current block
	line    int
	err     error
}

// NewReader reads the meta line. It fails with an error that wraps
// [ErrNotRecording], [ErrVersion], [ErrCorrupt] or [ErrTruncated]. hook names
// hooks; tracer.HookName does.
func NewReader(r io.Reader, hook func(mm.Hook) string) (*Reader, error) {
	br := bufio.NewReaderSize(r, 64<<10)
	rd := &Reader{}
	head, err := br.Peek(len(magic))
	switch {
	case len(head) == 0 && err == io.EOF:
		return nil, fmt.Errorf("file is empty: %w", ErrTruncated)
	case err != nil && err != io.EOF:
		return nil, err
	case bytes.HasPrefix([]byte(magic[:7]), head[:min(7, len(head))]):
		if rd.blocks, err = newBlockReader(br); err != nil {
			return nil, err
		}
	case head[0] == '{':
		rd.text = br
	default:
		return nil, fmt.Errorf("neither magic number nor NDJSON: %w", ErrNotRecording)
	}
	line, err := rd.next()
	if err == io.EOF {
		err = ErrTruncated
	}
	if err != nil {
		return nil, err
	}
	m, ok, err := decodeMeta(line)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, ErrCorrupt)
	}
	if !ok {
		return nil, fmt.Errorf("no meta line: %w", ErrNotRecording)
	}
	rd.meta = m
	if rd.dec, err = NewDecoder(m, hook); errors.Is(err, ErrVersion) {
		return nil, err
	} else if err != nil {
		return nil, fmt.Errorf("%w: %w", err, ErrCorrupt)
	}
	return rd, nil
}

// Meta is the first line.
func (rd *Reader) Meta() *Meta { return rd.meta }

// Summary is the last line; nil until Read returned io.EOF.
func (rd *Reader) Summary() *Summary { return rd.summary }

// Frames returns the stack that [mm.Record].Stack stands for; nil if the
// stream has not told it.
func (rd *Reader) Frames(id uint32) []symbol.Frame { return rd.dec.Frames(id) }

// Read decodes the next record into r. It returns io.EOF behind the summary
// line, and otherwise an error that wraps [ErrCorrupt] or [ErrTruncated], or
// that of the underlying reader. An error stays.
func (rd *Reader) Read(r *mm.Record) error {
	if rd.err == nil {
		rd.err = rd.read(r)
	}
	return rd.err
}

func (rd *Reader) read(r *mm.Record) error {
	line, err := rd.next()
	for err == nil && bytes.HasPrefix(line, []byte(`{"finding":`)) {
		line, err = rd.next()
	}
	if err == io.EOF {
		return fmt.Errorf("no summary, whoever recorded did not end: %w", ErrTruncated)
	}
	if err != nil {
		return err
	}
	s, ok, err := decodeSummary(line)
	if ok && err == nil {
		if _, err := rd.next(); err != io.EOF {
			return fmt.Errorf("something follows the summary: %w", ErrCorrupt)
		}
		rd.summary = s
		return io.EOF
	}
	if err == nil {
		err = rd.dec.Record(line, r)
	}
	if err != nil {
		return fmt.Errorf("line %d: %w: %w", rd.line, err, ErrCorrupt)
	}
	return nil
}

// next returns the next line without its newline.
func (rd *Reader) next() ([]byte, error) {
	rd.line++
	if rd.text != nil {
		return rd.nextText()
	}
	for len(rd.rest) == 0 {
		var err error
		if rd.rest, err = rd.blocks.next(); err != nil {
			return nil, err
		}
	}
	i := bytes.IndexByte(rd.rest, '\n')
	if i < 0 {
		return nil, fmt.Errorf("line %d has no end: %w", rd.line, ErrCorrupt)
	}
	line := rd.rest[:i]
	rd.rest = rd.rest[i+1:]
	return line, nil
}

func (rd *Reader) nextText() ([]byte, error) {
	line, err := rd.text.ReadSlice('\n')
	switch {
	case err == nil:
		return line[:len(line)-1], nil
	case errors.Is(err, bufio.ErrBufferFull):
		long := append(rd.rest[:0], line...)
		for errors.Is(err, bufio.ErrBufferFull) && len(long) <= maxLine {
			line, err = rd.text.ReadSlice('\n')
			long = append(long, line...)
		}
		rd.rest = long
		if len(long) > maxLine {
			return nil, fmt.Errorf("line %d is longer than %d bytes: %w", rd.line, maxLine, ErrCorrupt)
		}
		if err == nil {
			return long[:len(long)-1], nil
		}
		line = long
	}
	if err == io.EOF && len(line) > 0 {
		return nil, fmt.Errorf("line %d has no end: %w", rd.line, ErrTruncated)
	}
	return nil, err
}
