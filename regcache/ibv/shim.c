// SPDX-License-Identifier: Apache-2.0

//go:build cgo

#if !__has_include(<infiniband/verbs.h>) || !__has_include(<rdma/rdma_cma.h>)
#error "package ibv needs the headers of libibverbs and librdmacm: apt-get install libibverbs-dev librdmacm-dev (or build with CGO_ENABLED=0: it then says that it was built without)"
#endif

#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "shim.h"

// The functions of libibverbs that are not inline. Some of the names are
// also macros with arguments; without arguments they are the functions.
#define VERBS(X) \
	X(ibv_get_device_list) X(ibv_free_device_list) X(ibv_get_device_name) X(ibv_open_device) X(ibv_close_device) \
	X(ibv_query_device) X(ibv_query_gid) X(ibv_alloc_pd) X(ibv_dealloc_pd) \
	X(ibv_reg_mr) X(ibv_reg_mr_iova2) X(ibv_dereg_mr) X(ibv_get_async_event) X(ibv_ack_async_event) \
	X(ibv_create_comp_channel) X(ibv_destroy_comp_channel) X(ibv_create_cq) X(ibv_destroy_cq) \
	X(ibv_get_cq_event) X(ibv_ack_cq_events) X(ibv_create_qp) X(ibv_modify_qp) X(ibv_destroy_qp) X(ibv_wc_status_str)

#define CM(X) \
	X(rdma_create_id) X(rdma_destroy_id) X(rdma_bind_addr) X(rdma_listen) X(rdma_get_src_port) X(rdma_get_request) \
	X(rdma_resolve_addr) X(rdma_resolve_route) X(rdma_create_qp) X(rdma_destroy_qp) X(rdma_connect) X(rdma_accept) X(rdma_disconnect)

#define FIELD(name) __typeof__(name) *name;

static struct {
	VERBS(FIELD)
	// ibv_query_port takes the structure of old, a part of today's.
	int (*query_port)(struct ibv_context *, uint8_t, struct ibv_port_attr *);
	int (*fork_status)(void); // from rdma-core 37
} verbs;

static struct { CM(FIELD) } cm;

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER; // guards the two and what follows
static int have_verbs, have_cm;

static void *find(void *lib, const char *name, char *why, int size)
{
	void *f = dlsym(lib, name);
	if (!f && !why[0])
		snprintf(why, size, "%s", dlerror());
	return f;
}

// ummu_load opens the libraries once. On failure why says what is missing.
int ummu_load(int with_cm, char *why, int size)
{
	int rc = 0;
	why[0] = 0;
	pthread_mutex_lock(&loading);
	if (!have_verbs) {
		void *lib = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
		if (!lib) {
			snprintf(why, size, "%s", dlerror());
			goto out;
		}
#define FIND(name) verbs.name = find(lib, #name, why, size);
		VERBS(FIND)
#undef FIND
		*(void **)&verbs.query_port = find(lib, "ibv_query_port", why, size);
		*(void **)&verbs.fork_status = dlsym(lib, "ibv_is_fork_initialized");
		if (why[0])
			goto out;
		have_verbs = 1;
	}
	if (with_cm && !have_cm) {
		void *lib = dlopen("librdmacm.so.1", RTLD_NOW | RTLD_LOCAL);
		if (!lib) {
			snprintf(why, size, "%s", dlerror());
			goto out;
		}
#define FIND(name) cm.name = find(lib, #name, why, size);
		CM(FIND)
#undef FIND
		if (why[0])
			goto out;
		have_cm = 1;
	}
out:
	if (why[0])
		rc = ENOENT;
	pthread_mutex_unlock(&loading);
	return rc;
}

static int failed(void) { return errno ? errno : EIO; }

// An errno, or -1 and errno set: both styles are in use.
static int result(int rc) { return rc < 0 ? failed() : rc; }

void ummu_check(struct ummu_range *r) { (void)r; }

// ummu_devices writes the names, each with a newline.
int ummu_devices(char *names, int size)
{
	int n, at = 0;
	errno = 0;
	struct ibv_device **list = verbs.ibv_get_device_list(&n);
	if (!list)
		return failed();
	names[0] = 0;
	for (int i = 0; i < n && at < size - 1; i++)
		at += snprintf(names + at, size - at, "%s\n", verbs.ibv_get_device_name(list[i]));
	verbs.ibv_free_device_list(list);
	return 0;
}

int ummu_open(const char *name, void **context)
{
	int n, rc = ENODEV;
	errno = 0;
	struct ibv_device **list = verbs.ibv_get_device_list(&n);
	if (!list)
		return failed();
	for (int i = 0; i < n; i++) {
		if (strcmp(verbs.ibv_get_device_name(list[i]), name))
			continue;
		errno = 0;
		*context = verbs.ibv_open_device(list[i]);
		rc = *context ? 0 : failed();
		break;
	}
	verbs.ibv_free_device_list(list);
	return rc;
}

int ummu_close(void *context) { return result(verbs.ibv_close_device(context)); }

const char *ummu_name(void *context) { return verbs.ibv_get_device_name(((struct ibv_context *)context)->device); }

int ummu_fork_status(void) { return verbs.fork_status ? verbs.fork_status() : -1; }

int ummu_query(void *context, struct ummu_limits *l)
{
	struct ibv_device_attr_ex ex = {0};
	struct verbs_context *v = verbs_get_ctx_op((struct ibv_context *)context, query_device_ex);
	struct ibv_device_attr *a = &ex.orig_attr;
	int rc = v ? v->query_device_ex(context, NULL, &ex, sizeof(ex)) : EOPNOTSUPP;
	if (rc == EOPNOTSUPP || rc == ENOSYS) {
		memset(&ex, 0, sizeof(ex));
		rc = verbs.ibv_query_device(context, a);
	}
	if (rc)
		return result(rc);
	l->max_mr = a->max_mr;
	l->max_mr_size = a->max_mr_size;
	l->ports = a->phys_port_cnt;
	l->odp_general = ex.odp_caps.general_caps;
	l->odp_rc = ex.odp_caps.per_transport_caps.rc_odp_caps;
	return 0;
}

int ummu_port(void *context, int port, struct ummu_port *p)
{
	struct ibv_port_attr a = {0};
	int rc = verbs.query_port(context, port, &a);
	if (rc)
		return result(rc);
	p->gids = a.gid_tbl_len;
	p->lid = a.lid;
	p->ethernet = a.link_layer == IBV_LINK_LAYER_ETHERNET;
	p->active = a.state == IBV_PORT_ACTIVE;
	p->mtu = a.active_mtu;
	return 0;
}

int ummu_gid(void *context, int port, int index, uint8_t *gid)
{
	union ibv_gid g;
	int rc = verbs.ibv_query_gid(context, port, index, &g);
	if (rc)
		return result(rc);
	memcpy(gid, g.raw, sizeof(g.raw));
	return 0;
}

// ummu_fatal takes the asynchronous events that there are, and sets fatal if
// one of them says that the device is gone.
int ummu_fatal(void *context, int *fatal)
{
	struct ibv_context *c = context;
	for (;;) {
		struct pollfd p = {.fd = c->async_fd, .events = POLLIN};
		struct ibv_async_event e;
		int n = poll(&p, 1, 0);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return failed();
		if (n == 0)
			return 0;
		errno = 0;
		if (verbs.ibv_get_async_event(c, &e))
			return failed();
		if (e.event_type == IBV_EVENT_DEVICE_FATAL)
			*fatal = 1;
		verbs.ibv_ack_async_event(&e);
	}
}

int ummu_pd(void *context, void **pd)
{
	errno = 0;
	*pd = verbs.ibv_alloc_pd(context);
	return *pd ? 0 : failed();
}

int ummu_free_pd(void *pd) { return result(verbs.ibv_dealloc_pd(pd)); }

#define SAME(a, b) _Static_assert((int)(a) == (int)(b), "access flag")
SAME(UMMU_LOCAL_WRITE, IBV_ACCESS_LOCAL_WRITE);
SAME(UMMU_REMOTE_WRITE, IBV_ACCESS_REMOTE_WRITE);
SAME(UMMU_REMOTE_READ, IBV_ACCESS_REMOTE_READ);
SAME(UMMU_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_ATOMIC);
SAME(UMMU_ON_DEMAND, IBV_ACCESS_ON_DEMAND);
SAME(UMMU_RELAXED_ORDERING, IBV_ACCESS_RELAXED_ORDERING);

int ummu_register(void *pd, uint64_t addr, uint64_t length, uint64_t iova, unsigned access, struct ummu_mr *mr)
{
	struct ibv_mr *m;
	errno = 0;
	if (iova == addr && !(access & IBV_ACCESS_OPTIONAL_RANGE))
		m = (verbs.ibv_reg_mr)(pd, (void *)(uintptr_t)addr, length, access);
	else // leaves out optional flags that the kernel does not know
		m = verbs.ibv_reg_mr_iova2(pd, (void *)(uintptr_t)addr, length, iova, access);
	if (!m)
		return failed();
	mr->mr = m;
	mr->lkey = m->lkey;
	mr->rkey = m->rkey;
	return 0;
}

int ummu_deregister(void *mr) { return result(verbs.ibv_dereg_mr(mr)); }

// Queue pairs.

static int make_cq(struct ibv_context *context, int depth, struct ummu_queue *q)
{
	struct ibv_comp_channel *ch;
	errno = 0;
	memset(q, 0, sizeof(*q));
	q->context = context;
	q->channel = ch = verbs.ibv_create_comp_channel(context);
	if (!ch)
		return failed();
	q->fd = ch->fd;
	q->cq = verbs.ibv_create_cq(context, 2 * depth, NULL, ch, 0);
	if (!q->cq) {
		int rc = failed();
		verbs.ibv_destroy_comp_channel(ch);
		return rc;
	}
	return 0;
}

static struct ibv_qp_init_attr qp_attributes(struct ummu_queue *q, int depth)
{
	return (struct ibv_qp_init_attr){
		.send_cq = q->cq,
		.recv_cq = q->cq,
		.cap = {.max_send_wr = depth, .max_recv_wr = depth, .max_send_sge = 1, .max_recv_sge = 1},
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 1,
	};
}

static int free_cq(struct ummu_queue *q)
{
	int rc = 0;
	if (q->cq)
		rc = result(verbs.ibv_destroy_cq(q->cq));
	if (!rc && q->channel)
		rc = result(verbs.ibv_destroy_comp_channel(q->channel));
	return rc;
}

int ummu_queue(void *context, void *pd, int depth, struct ummu_queue *q)
{
	int rc = make_cq(context, depth, q);
	if (rc)
		return rc;
	struct ibv_qp_init_attr a = qp_attributes(q, depth);
	errno = 0;
	struct ibv_qp *qp = verbs.ibv_create_qp(pd, &a);
	if (!qp) {
		rc = failed();
		free_cq(q);
		return rc;
	}
	q->qp = qp;
	q->number = qp->qp_num;
	return 0;
}

int ummu_free_queue(struct ummu_queue *q)
{
	int rc = q->qp ? result(verbs.ibv_destroy_qp(q->qp)) : 0;
	if (rc)
		return rc;
	q->qp = NULL;
	return free_cq(q);
}

#define ALL_REMOTE (IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)

// ummu_connect takes a new queue pair to the state where it sends and receives.
int ummu_connect(void *qp, const struct ummu_peer *p)
{
	struct ibv_qp_attr init = {
		.qp_state = IBV_QPS_INIT,
		.port_num = p->port,
		.qp_access_flags = ALL_REMOTE,
	};
	int rc = verbs.ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
	if (rc)
		return result(rc);
	struct ibv_qp_attr rtr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = p->mtu,
		.dest_qp_num = p->qpn,
		.rq_psn = p->psn,
		.max_dest_rd_atomic = 4,
		.min_rnr_timer = 12,
		.ah_attr = {.dlid = p->lid, .port_num = p->port, .is_global = p->global},
	};
	if (p->global) {
		memcpy(rtr.ah_attr.grh.dgid.raw, p->gid, sizeof(p->gid));
		rtr.ah_attr.grh.sgid_index = p->gid_index;
		rtr.ah_attr.grh.hop_limit = 64;
	}
	rc = verbs.ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	if (rc)
		return result(rc);
	struct ibv_qp_attr rts = {
		.qp_state = IBV_QPS_RTS,
		.sq_psn = p->my_psn,
		.timeout = 14,  // 4.096 us << 14: 67 ms
		.retry_cnt = 7, // then the transfer fails
		.rnr_retry = 7, // for ever
		.max_rd_atomic = 4,
	};
	return result(verbs.ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
						       IBV_QP_MAX_QP_RD_ATOMIC));
}

// ummu_disconnect ends everything posted, with completions that say so.
int ummu_disconnect(void *qp)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_ERR};
	return result(verbs.ibv_modify_qp(qp, &a, IBV_QP_STATE));
}

int ummu_send(void *qp, const struct ummu_work *w)
{
	struct ibv_sge sge = {.addr = w->addr, .length = w->length, .lkey = w->lkey};
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED}, *bad;
	if (w->op == UMMU_ADD) {
		wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
		wr.wr.atomic.remote_addr = w->remote;
		wr.wr.atomic.rkey = w->rkey;
		wr.wr.atomic.compare_add = w->add;
	} else {
		wr.opcode = w->op == UMMU_READ ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
		wr.wr.rdma.remote_addr = w->remote;
		wr.wr.rdma.rkey = w->rkey;
	}
	return result(ibv_post_send(qp, &wr, &bad));
}

static int64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static int take(struct ibv_cq *cq, struct ummu_completion *c)
{
	struct ibv_wc wc;
	int n = ibv_poll_cq(cq, 1, &wc);
	if (n <= 0)
		return n;
	c->status = wc.status;
	c->vendor = wc.vendor_err;
	return 1;
}

// ummu_complete takes a completion: it looks a while, then sleeps until the
// channel says that there is one. ETIMEDOUT: none came.
int ummu_complete(struct ummu_queue *q, int milliseconds, struct ummu_completion *c)
{
	int64_t end = now() + milliseconds;
	for (;;) {
		int n;
		for (int i = 0; i < 100; i++)
			if ((n = take(q->cq, c)))
				return n > 0 ? 0 : EIO;
		if ((n = ibv_req_notify_cq(q->cq, 0)))
			return result(n);
		// One that came before the request is not told.
		if ((n = take(q->cq, c)))
			return n > 0 ? 0 : EIO;
		struct pollfd p = {.fd = q->fd, .events = POLLIN};
		int64_t left = end - now();
		if (left <= 0)
			return ETIMEDOUT;
		n = poll(&p, 1, left);
		if (n < 0 && errno != EINTR)
			return failed();
		if (n > 0) {
			struct ibv_cq *cq;
			void *data;
			errno = 0;
			if (verbs.ibv_get_cq_event(q->channel, &cq, &data))
				return failed();
			verbs.ibv_ack_cq_events(cq, 1);
		}
	}
}

const char *ummu_status(int status) { return verbs.ibv_wc_status_str(status); }

// RDMA-CM.

int ummu_cm_listen(const void *addr, void **out)
{
	struct rdma_cm_id *id;
	errno = 0;
	if (cm.rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP))
		return failed();
	if (cm.rdma_bind_addr(id, (struct sockaddr *)addr) || cm.rdma_listen(id, 16)) {
		int rc = failed();
		cm.rdma_destroy_id(id);
		return rc;
	}
	*out = id;
	return 0;
}

int ummu_cm_port(void *id) { return ntohs(cm.rdma_get_src_port(id)); }

// ummu_cm_next takes a request: ETIMEDOUT if none came.
int ummu_cm_next(void *listener, int milliseconds, void **out)
{
	struct rdma_cm_id *l = listener, *id;
	struct pollfd p = {.fd = l->channel->fd, .events = POLLIN};
	int n = poll(&p, 1, milliseconds);
	if (n < 0 && errno != EINTR)
		return failed();
	if (n <= 0)
		return ETIMEDOUT;
	errno = 0;
	if (cm.rdma_get_request(l, &id))
		return failed();
	*out = id;
	return 0;
}

int ummu_cm_resolve(const void *addr, int milliseconds, void **out)
{
	struct rdma_cm_id *id;
	errno = 0;
	if (cm.rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP))
		return failed();
	if (cm.rdma_resolve_addr(id, NULL, (struct sockaddr *)addr, milliseconds) || cm.rdma_resolve_route(id, milliseconds)) {
		int rc = failed();
		cm.rdma_destroy_id(id);
		return rc;
	}
	*out = id;
	return 0;
}

void *ummu_cm_context(void *id) { return ((struct rdma_cm_id *)id)->verbs; }

int ummu_cm_queue(void *cmid, void *pd, int depth, struct ummu_queue *q)
{
	struct rdma_cm_id *id = cmid;
	int rc = make_cq(id->verbs, depth, q);
	if (rc)
		return rc;
	struct ibv_qp_init_attr a = qp_attributes(q, depth);
	errno = 0;
	if (cm.rdma_create_qp(id, pd, &a)) {
		rc = failed();
		free_cq(q);
		return rc;
	}
	q->qp = id->qp;
	q->number = id->qp->qp_num;
	return 0;
}

int ummu_cm_connect(void *cmid, int accept, const void *data, int size)
{
	struct rdma_conn_param p = {
		.private_data = data,
		.private_data_len = size,
		.responder_resources = 4,
		.initiator_depth = 4,
		.retry_count = 7,
		.rnr_retry_count = 7,
	};
	errno = 0;
	return result(accept ? cm.rdma_accept(cmid, &p) : cm.rdma_connect(cmid, &p));
}

// ummu_cm_data copies what the peer sent with its request or answer, and
// returns its size, which the transport may have rounded up.
int ummu_cm_data(void *cmid, void *data, int size)
{
	struct rdma_cm_id *id = cmid;
	if (!id->event || !id->event->param.conn.private_data)
		return 0;
	int n = id->event->param.conn.private_data_len;
	if (n > size)
		n = size;
	memcpy(data, id->event->param.conn.private_data, n);
	return n;
}

int ummu_cm_disconnect(void *id)
{
	errno = 0;
	return result(cm.rdma_disconnect(id));
}

void ummu_cm_free_queue(void *id, struct ummu_queue *q)
{
	cm.rdma_destroy_qp(id);
	q->qp = NULL;
	free_cq(q);
}

int ummu_cm_free(void *id) { return result(cm.rdma_destroy_id(id)); }
