// SPDX-License-Identifier: Apache-2.0

//go:build !race

package oracle

// ownsBrk: nobody but the steps moves the program break. Go does not use it.
const ownsBrk = true
