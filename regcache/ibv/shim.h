// SPDX-License-Identifier: Apache-2.0

// The part of libibverbs and librdmacm that package ibv uses, in plain types:
// objects are void pointers, results are 0 or an errno. Neither library is
// linked: the first call of ummu_load opens it.

#ifndef UMMU_IBV_SHIM_H
#define UMMU_IBV_SHIM_H

#include <stdint.h>

// What a registration is asked for. addr is a pointer only so that the Go
// runtime checks it (see memory.go).
struct ummu_range {
	void *addr;
};

struct ummu_limits {
	uint64_t max_mr_size;
	uint64_t odp_general; // enum ibv_odp_general_caps
	uint32_t odp_rc;      // enum ibv_odp_transport_cap_bits
	int32_t max_mr;
	uint32_t ports;
};

struct ummu_port {
	uint32_t gids;
	uint16_t lid;
	uint8_t ethernet;
	uint8_t active;
	uint8_t mtu; // enum ibv_mtu
};

struct ummu_mr {
	void *mr;
	uint32_t lkey, rkey;
};

struct ummu_queue {
	void *channel, *cq, *qp;
	void *context;
	uint32_t number;
	int fd;
};

struct ummu_peer {
	uint8_t gid[16];
	uint32_t qpn, psn, my_psn;
	uint16_t lid;
	uint8_t port, gid_index, mtu, global;
};

enum { UMMU_WRITE, UMMU_READ, UMMU_ADD };

// One work request on one element of local memory.
struct ummu_work {
	uint64_t addr, remote, add;
	uint32_t length, lkey, rkey;
	int op; // one of the below
};

struct ummu_completion {
	uint32_t status, vendor; // enum ibv_wc_status
};

// Rights and properties of a registration, as in enum ibv_access_flags.
enum {
	UMMU_LOCAL_WRITE = 1,
	UMMU_REMOTE_WRITE = 2,
	UMMU_REMOTE_READ = 4,
	UMMU_REMOTE_ATOMIC = 8,
	UMMU_ON_DEMAND = 64,
	UMMU_RELAXED_ORDERING = 1 << 20,
};

void ummu_check(struct ummu_range *r);

int ummu_load(int cm, char *why, int size);
int ummu_devices(char *names, int size);
int ummu_open(const char *name, void **context);
int ummu_close(void *context);
const char *ummu_name(void *context);
int ummu_fork_status(void);
int ummu_query(void *context, struct ummu_limits *l);
int ummu_port(void *context, int port, struct ummu_port *p);
int ummu_gid(void *context, int port, int index, uint8_t *gid);
int ummu_fatal(void *context, int *fatal);
int ummu_pd(void *context, void **pd);
int ummu_free_pd(void *pd);
int ummu_register(void *pd, uint64_t addr, uint64_t length, uint64_t iova, unsigned access, struct ummu_mr *mr);
int ummu_deregister(void *mr);

int ummu_queue(void *context, void *pd, int depth, struct ummu_queue *q);
int ummu_free_queue(struct ummu_queue *q);
int ummu_connect(void *qp, const struct ummu_peer *p);
int ummu_disconnect(void *qp);
int ummu_send(void *qp, const struct ummu_work *w);
int ummu_complete(struct ummu_queue *q, int milliseconds, struct ummu_completion *c);
const char *ummu_status(int status);

// RDMA-CM, with identifiers whose calls wait for their end. addr is a struct
// sockaddr_in or sockaddr_in6.
int ummu_cm_listen(const void *addr, void **id);
int ummu_cm_port(void *id);
int ummu_cm_next(void *listener, int milliseconds, void **id);
int ummu_cm_resolve(const void *addr, int milliseconds, void **id);
void *ummu_cm_context(void *id);
int ummu_cm_queue(void *id, void *pd, int depth, struct ummu_queue *q);
int ummu_cm_connect(void *id, int accept, const void *data, int size);
int ummu_cm_data(void *id, void *data, int size);
int ummu_cm_disconnect(void *id);
void ummu_cm_free_queue(void *id, struct ummu_queue *q);
int ummu_cm_free(void *id);

#endif
