// SPDX-License-Identifier: Apache-2.0

package main

import "testing"

func TestInterval(t *testing.T) {
	for _, c := range []struct {
		n         int
		low, high float64 // ranks, from tables of the sign test
	}{
		{6, 1, 6}, {8, 1, 8}, {9, 2, 8}, {30, 10, 21}, {50, 18, 33}, {100, 40, 61},
	} {
		x := make([]float64, c.n)
		for i := range x {
			x[i] = float64(c.n - i)
		}
		if low, high := interval(x); low != c.low || high != c.high {
			t.Errorf("n=%d: ranks %v to %v, want %v to %v", c.n, low, high, c.low, c.high)
		}
	}
}

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		x    []float64
		want float64
	}{
		{[]float64{3}, 3}, {[]float64{3, 1}, 2}, {[]float64{9, 1, 5}, 5}, {[]float64{4, 1, 3, 2}, 2.5},
	} {
		if got := median(c.x); got != c.want {
			t.Errorf("median of %v is %v, want %v", c.x, got, c.want)
		}
	}
}
