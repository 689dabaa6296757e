/* Transfers between host memory and the file, with checksums. Include after pool.h and checksum.h. */
#include <errno.h>
#include <unistd.h>

static int failed(Failure *failure, int error, int64_t where) {
    failure->error = error;
    failure->where = where;
    return 0;
}

/* Writes or reads `bytes` from the part's byte `from` on, from or to `memory`. Continues short transfers.
 * Returns 1, or 0 with the failure filled in. */
static int move_bytes(const Part *part, char *memory, size_t from, size_t bytes, Failure *failure) {
    size_t done = 0;
    while (done < bytes) {
        int64_t at = part->offset + (int64_t)(from + done);
        ssize_t n = part->operation == WRITE ? pwrite(part->fd, memory + done, bytes - done, at)
                                             : pread(part->fd, memory + done, bytes - done, at);
        if (n > 0) { done += (size_t)n; continue; }
        if (n < 0 && errno == EINTR) continue;
        return failed(failure, n < 0 ? errno : (part->operation == READ ? END_OF_FILE : EIO), at);
    }
    return 1;
}

/* Records the sums of the blocks from byte `from` on for a write, compares them for a read. Returns as `move_bytes`. */
static int check(const Part *part, const char *memory, size_t from, size_t bytes, Failure *failure) {
    uint64_t *sum = part->sums + from / BLOCK;
    atomic_fetch_add_explicit(&part->request->pool->summed_bytes, bytes, memory_order_relaxed);
    for (size_t at = 0; at < bytes; at += BLOCK, sum++) {
        uint64_t found = block_sum(memory + at, bytes - at < BLOCK ? bytes - at : BLOCK);
        if (part->operation == WRITE) *sum = found;
        if (found != *sum) return failed(failure, CHECKSUM_MISMATCH, part->offset + (int64_t)(from + at));
    }
    return 1;
}

/* Moves bytes and handles their sums. `from` is a multiple of BLOCK. Returns as `move_bytes`. */
static int transfer(const Part *part, char *memory, size_t from, size_t bytes, Failure *failure) {
    if (part->sums && part->operation == WRITE && !check(part, memory, from, bytes, failure)) return 0;
    if (!move_bytes(part, memory, from, bytes, failure)) return 0;
    return part->operation == WRITE || !part->sums || check(part, memory, from, bytes, failure);
}
