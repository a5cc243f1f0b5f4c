/* SPDX-License-Identifier: Apache-2.0 */
#include "capture.h"

int exported(int n);

int main(void)
{
	return exported(1) != 4;	/* line 8 */
}
