// SPDX-License-Identifier: Apache-2.0

package truth

import (
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// No row is left out on a kernel that has what it needs.
func TestFeatures(t *testing.T) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	var have [2]int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &have[0], &have[1]); err != nil {
		t.Fatalf("read release %s: %v", u.Release, err)
	}
	for f := Always + 1; int(f) < len(features); f++ {
		var since [2]int
		if _, err := fmt.Sscanf(features[f].since, "%d.%d", &since[0], &since[1]); err != nil {
			t.Fatal(err)
		}
		want := have[0] > since[0] || have[0] == since[0] && have[1] >= since[1]
		got, err := f.Available()
		if f == CompatABI && os.Getenv("UMMU_TEST_MACHINE") == "" {
			want = got // the machine's to say, whatever the kernel
		}
		if err != nil || got != want {
			t.Errorf("%v (%s) on Linux %d.%d: %v, want %v (%v)", f, features[f].since, have[0], have[1], got, want, err)
		}
	}
}
