// SPDX-License-Identifier: Apache-2.0
#include "capture.h"
#include <vector>

namespace app {
template <typename T> struct Pool {
	std::vector<T> items;
	__attribute__((noinline)) void drop(const std::vector<T> &v)
	{
		items = v;
		capture();	// line 11
	}
};
}

int main()
{
	app::Pool<int> p;
	p.drop({1, 2});		// line 19
	return 0;
}
