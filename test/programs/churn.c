// SPDX-License-Identifier: Apache-2.0

// churn allocates and frees through malloc from several threads, so that
// whatever allocator is preloaded maps, unmaps, drops and moves memory. It
// checks the bytes it reads back and prints nothing when they are right.
// Usage: churn [THREADS [ROUNDS]]

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SLOTS = 64 };

static long rounds = 3000;

static uint32_t next(uint32_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 17;
	*state ^= *state << 5;
	return *state;
}

// size is small most of the time and up to 8 MiB now and then.
static size_t size(uint32_t *state)
{
	switch (next(state) % 16) {
	case 0:
		return 1 + next(state) % (8 << 20);
	case 1:
	case 2:
		return 1 + next(state) % (256 << 10);
	default:
		return 1 + next(state) % 4096;
	}
}

static void fill(unsigned char *p, size_t n, unsigned char v)
{
	p[0] = v;
	p[n / 2] = v;
	p[n - 1] = v;
}

static void check(const unsigned char *p, size_t n, unsigned char v)
{
	if (p[0] != v || p[n / 2] != v || p[n - 1] != v) {
		fprintf(stderr, "churn: a block of %zu bytes lost its content\n", n);
		abort();
	}
}

static void *churn(void *arg)
{
	uint32_t state = 2463534242u + (uint32_t)(uintptr_t)arg * 7919u;
	unsigned char *block[SLOTS] = { 0 };
	size_t length[SLOTS] = { 0 };

	for (long i = 0; i < rounds; i++) {
		unsigned slot = next(&state) % SLOTS;
		if (block[slot] && next(&state) % 4 == 0) {
			size_t n = size(&state);
			unsigned char first = block[slot][0];
			unsigned char *p = realloc(block[slot], n);
			if (!p || p[0] != first)
				abort();
			block[slot] = p;
			length[slot] = n;
			fill(p, n, (unsigned char)slot);
			continue;
		}
		if (block[slot]) {
			check(block[slot], length[slot], (unsigned char)slot);
			free(block[slot]);
		}
		length[slot] = size(&state);
		block[slot] = malloc(length[slot]);
		if (!block[slot])
			abort();
		fill(block[slot], length[slot], (unsigned char)slot);
	}
	for (unsigned slot = 0; slot < SLOTS; slot++) {
		if (block[slot])
			check(block[slot], length[slot], (unsigned char)slot);
		free(block[slot]);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	long threads = argc > 1 ? atol(argv[1]) : 4;
	if (argc > 2)
		rounds = atol(argv[2]);
	if (threads < 1 || threads > 64 || rounds < 1)
		return 2;

	pthread_t id[64];
	for (long i = 0; i < threads; i++)
		if (pthread_create(&id[i], NULL, churn, (void *)i))
			return 1;
	for (long i = 0; i < threads; i++)
		pthread_join(id[i], NULL);

	// A child that goes on with the allocator's inherited state.
	pid_t child = fork();
	if (child == 0) {
		churn((void *)99);
		_exit(0);
	}
	int status;
	if (child < 0 || waitpid(child, &status, 0) != child || status)
		return 1;
	return 0;
}
