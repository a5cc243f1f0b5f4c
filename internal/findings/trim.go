// SPDX-License-Identifier: Apache-2.0

package findings

import (
	"strings"

	"github.com/ummu/ummu/internal/symbol"
)

// allocators are functions that give memory back to the kernel on behalf of a
// program that freed some: of the C library, of C++, and of allocators that
// are linked in its place under names of their own.
var allocators = map[string]bool{
	"free": true, "cfree": true, "realloc": true, "reallocarray": true, "malloc": true, "calloc": true,
	"malloc_trim": true, "mallopt": true, "posix_memalign": true, "aligned_alloc": true, "memalign": true,
	"__libc_free": true, "__libc_realloc": true, "__libc_malloc": true, "__libc_memalign": true, "_int_free": true,
	"munmap_chunk": true, "systrim": true, "heap_trim": true,
	"operator delete": true, "operator delete[]": true, "operator new": true, "operator new[]": true,
	"sdallocx": true, "dallocx": true, "rallocx": true, "mallocx": true,
	"free_sized": true, "free_aligned_sized": true,
}

// prefixes of the functions of allocators and of Go's runtime.
var prefixes = []string{
	"je_", "jemalloc_", "_rjem_", "tc_", "tcmalloc", "mi_", "_mi_", "scalable_free", "scalable_realloc",
	"runtime.sysUnused", "runtime.sysFree", "runtime.sysFault", "runtime.(*pageAlloc).scavenge",
}

// isTrim reports whether a change was made by an allocator.
func isTrim(fs []symbol.Frame) bool {
	for i := range fs {
		base := fs[i].Base()
		if allocators[base] {
			return true
		}
		for _, p := range prefixes {
			if strings.HasPrefix(fs[i].Func, p) || strings.HasPrefix(base, p) {
				return true
			}
		}
		if strings.Contains(fs[i].Func, "tcmalloc::") {
			return true
		}
	}
	return false
}
