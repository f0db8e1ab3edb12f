/* The bodies of algorithms.py in C: publish, wait, compare signatures, copy, add.

   The memory and the ticks are those of segment.py and layout.py, and each rank's chunks are those of
   algorithms.py, so that ranks with and without this library meet in one group. It knows no Python:
   compiled.py fills the two structs below, calls `advance`, and sleeps where that returns a tick.
   Sums have the bits of arithmetic.py: in rank order, halves in float32 and rounded once. */

#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef int64_t i64;

enum { BARRIER = 1, BROADCAST, ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, REDUCE };  /* Kind */
enum { SUM = 0, AVG = 4 };                                                        /* ReduceOp */
enum { DONE = 0, ABORTED = -1, MISMATCH = -2 };  /* What `advance` returns besides a tick. */
enum { MOST_RANKS = 256, TILE = 2048, LINE = 64 };
enum { YIELDS_NS = 200000, PAUSES = 100 };
/* How long `advance` waits for a tick: YIELD after PAUSE. ONE_TICK: it publishes one, and returns it. */
enum { ONE_TICK = -1, NO_WAIT, PAUSE, YIELD };

/* What a rank has for as long as its group lives. The second line: words, as in layout.py. */
struct place {
    i64 base, rank, size, slots_at, slot_bytes, sites_at, site_bytes, has_cores;
    i64 abort_word, blocks, block_words, tick, sleeps_on, signature;
};

/* One operation; the first two lines are the same in all of its signature. count: elements of `in`, or
   of `out` if that is smaller. chunk: elements of a tick. */
struct task {
    const struct place *place;
    i64 ticks, kind, dtype, width, op, root, count, chunk, what, numel;
    i64 first, step, sequence;
    char *in, *out;
    char site[];
};

/* -- sums --------------------------------------------------------------------------------------- */

/* Tiles: `out` may be one of the parts, and what is written twice is still in the cache. */
#define ADDS(NAME, TARGETS, T, SUM_T, LOAD, STORE)                                               \
    TARGETS static void NAME(char *to, char *also, char **from, i64 ranks, i64 n, int average) { \
        T *out = (T *)to, *too = (T *)also;                                                      \
        for (i64 at = 0; at < n; at += TILE) {                                                   \
            i64 width = n - at < TILE ? n - at : TILE;                                           \
            SUM_T sum[TILE];                                                                     \
            const T *a = (T *)from[0] + at, *b = (T *)from[1] + at;                              \
            for (i64 i = 0; i < width; i++) sum[i] = LOAD(a[i]) + LOAD(b[i]);                    \
            for (i64 r = 2; r < ranks; r++) {                                                    \
                const T *part = (T *)from[r] + at;                                               \
                for (i64 i = 0; i < width; i++) sum[i] += LOAD(part[i]);                         \
            }                                                                                    \
            if (average)                                                                         \
                for (i64 i = 0; i < width; i++) sum[i] /= (SUM_T)ranks;                          \
            for (i64 i = 0; i < width; i++) out[at + i] = STORE(sum[i]);                         \
            if (too) memcpy(too + at, out + at, width * sizeof(T));                              \
        }                                                                                        \
    }

#define AS_IT_IS(x) (x)

static inline float of_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static inline uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16; /* to nearest, ties to even */
    return value == value ? rounded : 0x7FC0;
}

/* Without F16C each half would be converted by a function. */
#if defined(__x86_64__) && defined(__GLIBC__)
#define EACH_PROCESSOR __attribute__((target_clones("arch=haswell", "default")))
#else
#define EACH_PROCESSOR
#endif

ADDS(add_float32, , float, float, AS_IT_IS, AS_IT_IS)
ADDS(add_float64, , double, double, AS_IT_IS, AS_IT_IS)
ADDS(add_bfloat16, EACH_PROCESSOR, uint16_t, float, of_bfloat16, to_bfloat16)
ADDS(add_int32, , uint32_t, uint32_t, AS_IT_IS, AS_IT_IS)
ADDS(add_int64, , uint64_t, uint64_t, AS_IT_IS, AS_IT_IS)
#ifdef __FLT16_MAX__
ADDS(add_float16, EACH_PROCESSOR, _Float16, float, (float), (_Float16))
#else
#define add_float16 0
#endif

/* By the position in DTYPE_NAMES. */
static void (*const by_dtype[])(char *, char *, char **, i64, i64, int) = {
    add_float32, add_float64, add_float16, add_bfloat16, add_int32, add_int64,
};

/* Whether a group of `size` ranks can reduce `dtype` with `op` here. */
int can_add(i64 dtype, i64 op, i64 size) {
    int is_float = dtype < 4;
    return size <= MOST_RANKS && dtype < 6 && by_dtype[dtype] && (op == SUM || (op == AVG && is_float));
}

static void add(const struct task *t, char *out, char *too, char **parts, i64 n) {
    i64 size = t->place->size;
    if (n <= 0) return;
    if (size > 1) return by_dtype[t->dtype](out, too, parts, size, n, t->op == AVG);
    if (out != parts[0]) memmove(out, parts[0], n * t->width);
    if (too) memcpy(too, parts[0], n * t->width);
}

/* -- ticks -------------------------------------------------------------------------------------- */

static _Atomic uint64_t *word(const struct place *p, i64 at) {
    return (_Atomic uint64_t *)p->base + at;
}

static i64 block(const struct place *p, i64 rank) { return p->blocks + rank * p->block_words; }

static char *slot(const struct place *p, i64 rank, i64 tick) {
    return (char *)p->base + p->slots_at + (2 * rank + (tick & 1)) * p->slot_bytes;
}

static int reached(const struct place *p, i64 tick) {
    for (i64 r = 0; r < p->size; r++) {
        _Atomic uint64_t *at = word(p, block(p, r) + p->tick);
        if (r != p->rank && (i64)atomic_load_explicit(at, memory_order_acquire) < tick) return 0;
    }
    return 1;
}

static i64 now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int reached_soon(const struct place *p, i64 tick, int wait) {
    if (reached(p, tick)) return 1;
    /* With fewer cores than ranks, the late rank may need this one. */
    for (int i = 0; wait >= PAUSE && p->has_cores && i < PAUSES; i++) {
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
        if (reached(p, tick)) return 1;
    }
    if (wait < YIELD) return 0;
    for (i64 until = now_ns() + YIELDS_NS; now_ns() < until;) {
        sched_yield();
        if (reached(p, tick)) return 1;
    }
    return 0;
}

static void publish(const struct place *p, i64 tick) {
    _Atomic uint64_t *mine = word(p, block(p, p->rank) + p->tick);
    /* In one order with the reads below: a sleeper says that it sleeps before it looks again. */
    atomic_store(mine, tick);
    for (i64 r = 0; r < p->size; r++)
        if ((i64)atomic_load(word(p, block(p, r) + p->sleeps_on)) == p->rank + 1) {
            syscall(SYS_futex, mine, FUTEX_WAKE, INT32_MAX, 0, 0, 0);
            return;
        }
}

static void sign(const struct task *t) {
    const struct place *p = t->place;
    i64 parity = t->sequence & 1, at = block(p, p->rank) + p->signature + 4 * parity;
    atomic_store_explicit(word(p, at), t->sequence, memory_order_relaxed);
    atomic_store_explicit(word(p, at + 1), t->what, memory_order_relaxed);
    atomic_store_explicit(word(p, at + 2), t->numel, memory_order_relaxed);
    char *site = (char *)p->base + p->sites_at + (2 * p->rank + parity) * p->site_bytes;
    memcpy(site, t->site, p->site_bytes);
}

static int all_signed_this(const struct task *t) {
    const struct place *p = t->place;
    for (i64 r = 0; r < p->size; r++) {
        i64 at = block(p, r) + p->signature + 4 * (t->sequence & 1);
        if ((i64)*word(p, at + 1) != t->what || (i64)*word(p, at + 2) != t->numel) return 0;
    }
    return 1;
}

/* -- algorithms: what each does before it publishes tick `first + k`, and after all have -------- */

static i64 clamped(i64 n, i64 most) { return n < 0 ? 0 : n < most ? n : most; }

/* Every rank's part, at byte `at` of its slot of `tick`; this rank's at `own`. */
static char **parts_of(const struct place *p, char **parts, i64 tick, i64 at, char *own) {
    for (i64 r = 0; r < p->size; r++) parts[r] = r == p->rank ? own : slot(p, r, tick) + at;
    return parts;
}

/* all_reduce in parts: as `_all_reduce_in_parts`, with its numbers. */
static void in_parts(const struct task *t, i64 k, int published) {
    const struct place *p = t->place;
    i64 tick = t->first + k, width = t->width, part = t->chunk, half = p->slot_bytes / 2;
    for (i64 r = 0; r < p->size; r++) {
        i64 start = (k * p->size + r) * part, previous = start - p->size * part;
        if (!published) { /* 1 */
            i64 n = clamped(t->count - start, part);
            if (r != p->rank && n)
                memcpy(slot(p, p->rank, tick) + r * part * width, t->in + start * width, n * width);
        } else if (k && r != p->rank) { /* 4 */
            i64 n = clamped(t->count - previous, part);
            if (n) memcpy(t->out + previous * width, slot(p, r, tick) + half, n * width);
        }
    }
    if (published || !k) return;
    i64 start = ((k - 1) * p->size + p->rank) * part; /* 2 */
    char *parts[MOST_RANKS], *own = t->out + start * width;
    parts_of(p, parts, tick - 1, p->rank * part * width, own);
    add(t, own, slot(p, p->rank, tick) + half, parts, clamped(t->count - start, part));
}

static void before(const struct task *t, i64 k) {
    const struct place *p = t->place;
    i64 tick = t->first + k, width = t->width, start = k * t->chunk;
    i64 n = clamped(t->count - start, t->chunk);
    char *mine = slot(p, p->rank, tick);
    switch (t->kind) {
    case ALL_REDUCE:
        if (t->ticks > 1) return in_parts(t, k, 0);
        memcpy(mine, t->in, t->count * width);
        break;
    case REDUCE_SCATTER:
        for (i64 r = 0; r < p->size; r++)
            if (r != p->rank)
                memcpy(mine + r * ((n + LINE - 1) / LINE) * LINE * width,
                       t->in + (r * t->count + start) * width, n * width);
        break;
    case BROADCAST:
        if (p->rank != t->root) break; /* fall through */
    case REDUCE:
    case ALL_GATHER:
        memcpy(mine, t->in + start * width, n * width);
    }
}

static void after(const struct task *t, i64 k) {
    const struct place *p = t->place;
    i64 tick = t->first + k, width = t->width, start = k * t->chunk;
    i64 n = clamped(t->count - start, t->chunk);
    char *parts[MOST_RANKS], *own = t->in + start * width;
    switch (t->kind) {
    case ALL_REDUCE:
        if (t->ticks > 1) return in_parts(t, k, 1);
        add(t, t->out, 0, parts_of(p, parts, tick, 0, t->in), t->count);
        break;
    case REDUCE:
        if (p->rank == t->root) add(t, own, 0, parts_of(p, parts, tick, 0, own), n);
        break;
    case REDUCE_SCATTER: {
        i64 at = p->rank * ((n + LINE - 1) / LINE) * LINE * width;
        own += p->rank * t->count * width;
        add(t, t->out + start * width, 0, parts_of(p, parts, tick, at, own), n);
        break;
    }
    case BROADCAST:
        if (p->rank != t->root) memcpy(t->out + start * width, slot(p, t->root, tick), n * width);
        break;
    case ALL_GATHER:
        for (i64 r = 0; r < p->size; r++)
            if (r != p->rank)
                memcpy(t->out + (r * t->count + start) * width, slot(p, r, tick), n * width);
        own = t->out + p->rank * t->count * width;
        if (k == t->ticks - 1 && own != t->in) memmove(own, t->in, t->count * width);
    }
}

/* Do what can be done. Returns DONE; the tick that ranks are late for; ABORTED if the generation has
   ended, and either they are late or this rank has not taken part; or MISMATCH, before any tensor is
   written. wait: as above. */
i64 advance(struct task *t, int wait) {
    const struct place *p = t->place;
    for (;; t->step++) {
        i64 tick = t->first + t->step - 1;
        int late = !reached_soon(p, tick, wait);
        if ((late || t->step == 0) && atomic_load(word(p, p->abort_word))) return ABORTED;
        if (late) return tick;
        if (t->step == 0) {
            sign(t);
        } else {
            if (t->step == 1 && !all_signed_this(t)) return MISMATCH;
            after(t, t->step - 1);
        }
        if (t->step == t->ticks) return DONE;
        before(t, t->step);
        publish(p, tick + 1);
        if (wait == ONE_TICK) return t->step++, tick + 1;
    }
}
