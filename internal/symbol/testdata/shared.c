/* SPDX-License-Identifier: Apache-2.0 */
void capture(void);

static __attribute__((noinline)) int hidden(int n)
{
	capture();		/* line 6 */
	return n + 1;
}

int exported(int n)
{
	return hidden(n) * 2;	/* line 12 */
}
