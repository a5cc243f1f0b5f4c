// SPDX-License-Identifier: Apache-2.0

package target

import (
	"os"
	"strings"
	"testing"
)

func TestContainer(t *testing.T) {
	id := strings.Repeat("0123456789abcdef", 4)
	for in, want := range map[string]string{
		"":                                      "",
		"/":                                     "/",
		"/system.slice/docker-" + id + ".scope": "docker:0123456789ab",
		"/docker/" + id:                         "docker:0123456789ab",
		"/kubepods.slice/kubepods-pod1.slice/cri-containerd-" + id + ".scope": "cri-containerd:0123456789ab",
		"/machine.slice/libpod-" + id + ".scope/container":                    "libpod:0123456789ab",
		"/system.slice/ssh.service":                                           "ssh.service",
		"/user.slice/user-1000.slice/session-2.scope":                         "session-2.scope",
		"/system.slice/docker-" + id[:63] + ".scope":                          "docker-" + id[:63] + ".scope",
	} {
		if got := Container(in); got != want {
			t.Errorf("%q is %q, want %q", in, got, want)
		}
	}
}

func TestInGroup(t *testing.T) {
	id := strings.Repeat("0123456789abcdef", 4)
	docker := "/system.slice/docker-" + id + ".scope"
	for _, c := range []struct {
		in, asked string
		want      bool
	}{
		{"/a/b", "/a/b", true}, {"/a/b", "/a/b/", true}, {"/a/b/c", "/a/b", true}, {"/a/bc", "/a/b", false}, {"/a", "/a/b", false},
		{"/a/b", "/", true}, {docker, "docker:0123456789ab", true}, {docker, "docker:0123456789ac", false}, {"/a/ssh.service", "ssh.service", true},
		{"", "/", false}, {"", "", false},
	} {
		if got := inGroup(c.in, c.asked); got != c.want {
			t.Errorf("%q in %q: %v", c.in, c.asked, got)
		}
	}
}

func TestSelect(t *testing.T) {
	if Select(nil, nil) != nil {
		t.Error("a choice although nothing is asked for")
	}
	self := uint32(os.Getpid())
	own := ControlGroup(self)
	if own == "" {
		t.Fatal("this process is in no control group")
	}
	for _, c := range []struct {
		comms, groups []string
		want          bool
	}{
		{[]string{"a", "b"}, nil, true}, {[]string{"a"}, nil, false},
		{nil, []string{own}, true}, {nil, []string{"/no/such"}, false},
		{[]string{"b"}, []string{own}, true}, {[]string{"a"}, []string{own}, false},
	} {
		if got := Select(c.comms, c.groups)(self, "b"); got != c.want {
			t.Errorf("%q %q: %v", c.comms, c.groups, got)
		}
	}
	if Select(nil, []string{"/"})(1<<22+1, "x") {
		t.Error("a process that is not there is in a group")
	}
}
