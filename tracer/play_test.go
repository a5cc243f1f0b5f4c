// SPDX-License-Identifier: Apache-2.0

package tracer

func play(role string) {}
