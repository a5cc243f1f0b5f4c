// SPDX-License-Identifier: Apache-2.0

package recording

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/klauspost/compress/zstd"
)

// A recording is a sequence of blocks, each readable without the others:
//
//	 0  magic     8 bytes: "ummurec" and the version, 1
//	 8  stored    uint32: bytes of payload that follow the header
//	12  size      uint32: bytes of the payload when decompressed
//	16  lines     uint32: lines in it
//	20  number    uint32: 0, 1, 2, ... (wraps)
//	24  checksum  uint32: CRC-32C of the stored payload
//	28  checksum  uint32: CRC-32C of bytes 0 to 27
//
// in little-endian order. The payload is one Zstandard frame of whole lines.
const (
	headerSize = 32
	magic      = "ummurec\x01"

	// blockFill is the size at which a block is written. Larger blocks do not
	// compress better, and a crash loses what was not written.
	blockFill = 256 << 10
	// maxLine bounds one line, and with it what a reader must hold.
	maxLine = 1 << 20
	maxSize = blockFill + maxLine
	// maxStored: Zstandard stores what it cannot compress with a few bytes per 128 KiB.
	maxStored = maxSize + 4096
)

// Errors of reading a recording. What was delivered before is whole.
var (
	ErrNotRecording = errors.New("not a recording")
	ErrVersion      = errors.New("version is not known")
	ErrCorrupt      = errors.New("recording is damaged")
	ErrTruncated    = errors.New("recording ends too early")
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Writer writes lines in blocks. After an error of the underlying writer it
// refuses everything. It is not safe for concurrent use.
type Writer struct {
	w      io.Writer
	enc    *zstd.Encoder
	raw    []byte
	out    []byte
	lines  uint32
	number uint32
	offset int64 // end of the last whole block
	err    error
}

// NewWriter returns a Writer to w, which the caller closes. If w has a
// Truncate method, as *os.File, a block of which only a part could be written
// is cut off again.
func NewWriter(w io.Writer) (*Writer, error) {
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest),
		zstd.WithEncoderCRC(false), zstd.WithWindowSize(blockFill), zstd.WithLowerEncoderMem(true))
	if err != nil {
		return nil, fmt.Errorf("create compressor: %w", err)
	}
	return &Writer{w: w, enc: enc, raw: make([]byte, 0, maxSize)}, nil
}

// Write takes one whole line, with its newline.
func (w *Writer) Write(line []byte) (int, error) {
	if w.err != nil {
		return 0, w.err
	}
	if len(line) > maxLine {
		return 0, fmt.Errorf("line of %d bytes, limit is %d", len(line), maxLine)
	}
	w.raw = append(w.raw, line...)
	w.lines++
	if len(w.raw) >= blockFill {
		if err := w.Flush(); err != nil {
			return 0, err
		}
	}
	return len(line), nil
}

// Flush writes what is buffered as a block. Then a crash of this program loses
// nothing that was written before.
func (w *Writer) Flush() error {
	if w.err != nil || w.lines == 0 {
		return w.err
	}
	h := append(w.out[:0], magic...)
	h = append(h, make([]byte, headerSize-len(magic))...)
	out := w.enc.EncodeAll(w.raw, h)
	payload := out[headerSize:]
	binary.LittleEndian.PutUint32(out[8:], uint32(len(payload)))
	binary.LittleEndian.PutUint32(out[12:], uint32(len(w.raw)))
	binary.LittleEndian.PutUint32(out[16:], w.lines)
	binary.LittleEndian.PutUint32(out[20:], w.number)
	binary.LittleEndian.PutUint32(out[24:], crc32.Checksum(payload, castagnoli))
	binary.LittleEndian.PutUint32(out[28:], crc32.Checksum(out[:28], castagnoli))
	w.out = out
	if _, err := w.w.Write(out); err != nil {
		w.err = fmt.Errorf("write block %d: %w", w.number, err)
		if f, ok := w.w.(interface{ Truncate(int64) error }); ok {
			// If this fails too, the reader finds the last whole block by itself.
			_ = f.Truncate(w.offset)
		}
		return w.err
	}
	w.offset += int64(len(out))
	w.number++
	w.raw, w.lines = w.raw[:0], 0
	return nil
}

// blockReader reads blocks.
type blockReader struct {
	r      io.Reader
	dec    *zstd.Decoder
	stored []byte
	raw    []byte
	number uint32
	offset int64
}

func newBlockReader(r io.Reader) (*blockReader, error) {
	dec, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxSize), zstd.WithDecoderMaxWindow(8<<20))
	if err != nil {
		return nil, fmt.Errorf("create decompressor: %w", err)
	}
	return &blockReader{r: r, dec: dec}, nil
}

// next returns the lines of the next block, valid until the next call, and
// io.EOF behind the last.
func (b *blockReader) next() ([]byte, error) {
	raw, err := b.read()
	if err != nil && err != io.EOF {
		return nil, fmt.Errorf("block %d at byte %d: %w", b.number, b.offset, err)
	}
	if err == nil {
		b.number++
		b.offset += headerSize + int64(len(b.stored))
	}
	return raw, err
}

func (b *blockReader) read() ([]byte, error) {
	var h [headerSize]byte
	switch _, err := io.ReadFull(b.r, h[:]); {
	case err == io.EOF:
		return nil, io.EOF
	case errors.Is(err, io.ErrUnexpectedEOF):
		return nil, fmt.Errorf("header is incomplete: %w", ErrTruncated)
	case err != nil:
		return nil, err
	}
	if string(h[:7]) != magic[:7] {
		return nil, fmt.Errorf("no magic number: %w", ErrCorrupt)
	}
	if crc32.Checksum(h[:28], castagnoli) != binary.LittleEndian.Uint32(h[28:]) {
		return nil, fmt.Errorf("checksum of the header is wrong: %w", ErrCorrupt)
	}
	if h[7] != magic[7] {
		return nil, fmt.Errorf("format %d, known is %d: %w", h[7], magic[7], ErrVersion)
	}
	stored, size := binary.LittleEndian.Uint32(h[8:]), binary.LittleEndian.Uint32(h[12:])
	lines, number := binary.LittleEndian.Uint32(h[16:]), binary.LittleEndian.Uint32(h[20:])
	if stored > maxStored || size > maxSize {
		return nil, fmt.Errorf("sizes %d and %d are too large: %w", stored, size, ErrCorrupt)
	}
	if number != b.number {
		return nil, fmt.Errorf("it is block %d, others are missing: %w", number, ErrCorrupt)
	}
	if cap(b.stored) < int(stored) {
		b.stored = make([]byte, stored)
	}
	b.stored = b.stored[:stored]
	switch _, err := io.ReadFull(b.r, b.stored); {
	case errors.Is(err, io.ErrUnexpectedEOF) || err == io.EOF:
		return nil, fmt.Errorf("payload is incomplete: %w", ErrTruncated)
	case err != nil:
		return nil, err
	}
	if crc32.Checksum(b.stored, castagnoli) != binary.LittleEndian.Uint32(h[24:]) {
		return nil, fmt.Errorf("checksum of the payload is wrong: %w", ErrCorrupt)
	}
	if cap(b.raw) < int(size) {
		b.raw = make([]byte, 0, size)
	}
	raw, err := b.dec.DecodeAll(b.stored, b.raw[:0])
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, ErrCorrupt)
	}
	b.raw = raw
	if len(raw) != int(size) || countLines(raw) != int(lines) {
		return nil, fmt.Errorf("it holds %d bytes and %d lines instead of %d and %d: %w", len(raw), countLines(raw), size, lines, ErrCorrupt)
	}
	return raw, nil
}
