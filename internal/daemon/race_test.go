// SPDX-License-Identifier: Apache-2.0

//go:build race

package daemon

// raceDetector: the tests run with it.
const raceDetector = true
