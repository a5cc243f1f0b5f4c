/* SPDX-License-Identifier: Apache-2.0 */
#include "capture.h"

__attribute__((noinline)) static int inner(int n)
{
	volatile char room[200];

	room[n] = n;
	capture();		/* line 9 */
	return room[n];
}

static inline __attribute__((always_inline)) int inlined(int n)
{
	return inner(n) + 1;	/* line 15 */
}

__attribute__((noinline)) int outer(int n)
{
	return inlined(n) * 3;	/* line 20 */
}

/* A callback: the C library's qsort is between us and main. */
static int compare(const void *a, const void *b)
{
	static int once;

	if (!once++)
		outer(5);	/* line 29 */
	return *(const int *)a - *(const int *)b;
}

int main(void)
{
	int v[2] = {2, 1};

	qsort(v, 2, sizeof(v[0]), compare);	/* line 37 */
	return v[0] != 1;
}
