//go:build ignore
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stands in for libibverbs where there is no RDMA device: the functions that
 * planted.c calls, with the versions of the real library's symbols, and as
 * there the older ones call the newer ones. A registration fails for memory
 * that is not there and pins what is there by nothing but good will.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdlib.h>
#include <sys/mman.h>
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

#define EXPORT __attribute__((visibility("default"), noinline))

static struct ibv_device device = {.name = "standin0"};

EXPORT struct ibv_device **ibv_get_device_list(int *n)
{
	struct ibv_device **list = calloc(2, sizeof(*list));

	list[0] = &device;
	if (n)
		*n = 1;
	return list;
}

EXPORT void ibv_free_device_list(struct ibv_device **list)
{
	free(list);
}

EXPORT struct ibv_context *ibv_open_device(struct ibv_device *d)
{
	struct ibv_context *context = calloc(1, sizeof(*context));

	context->device = d;
	return context;
}

EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	struct ibv_pd *pd = calloc(1, sizeof(*pd));

	pd->context = context;
	return pd;
}

EXPORT struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access)
{
	static uint32_t key = 100;
	unsigned char there;
	struct ibv_mr *mr;

	(void)iova;
	(void)access;
	for (size_t i = 0; i < length; i += 4096) {
		if (mincore((void *)(((uintptr_t)addr + i) & ~4095UL), 1, &there)) {
			errno = EFAULT;
			return NULL;
		}
	}
	mr = calloc(1, sizeof(*mr));
	mr->context = pd->context;
	mr->pd = pd;
	mr->addr = addr;
	mr->length = length;
	mr->lkey = mr->rkey = __sync_add_and_fetch(&key, 1);
	return mr;
}

EXPORT struct ibv_mr *reg_mr_1_1(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	return ibv_reg_mr_iova2(pd, addr, length, (uintptr_t)addr, access);
}

EXPORT struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access)
{
	return ibv_reg_mr_iova2(pd, addr, length, iova, access);
}

EXPORT int dereg_mr_1_1(struct ibv_mr *mr)
{
	free(mr);
	return 0;
}

/* The versions of before 2006, whose structures are others. */
struct ibv_mr_1_0 {
	void *context, *pd;
	uint32_t handle, lkey, rkey;
	struct ibv_mr *real_mr;
};

EXPORT struct ibv_mr_1_0 *reg_mr_1_0(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	struct ibv_mr_1_0 *mr = calloc(1, sizeof(*mr));

	mr->real_mr = ibv_reg_mr_iova2(pd, addr, length, (uintptr_t)addr, access);
	return mr->real_mr ? mr : NULL;
}

EXPORT int dereg_mr_1_0(struct ibv_mr_1_0 *mr)
{
	return dereg_mr_1_1(mr->real_mr);
}

__asm__(".symver reg_mr_1_1,ibv_reg_mr@@IBVERBS_1.1");
__asm__(".symver dereg_mr_1_1,ibv_dereg_mr@@IBVERBS_1.1");
__asm__(".symver reg_mr_1_0,ibv_reg_mr@IBVERBS_1.0");
__asm__(".symver dereg_mr_1_0,ibv_dereg_mr@IBVERBS_1.0");
