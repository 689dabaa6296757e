/* The memory of large CPU tensors: c10's CPU allocator, with the pages of one range of addresses.
 *
 *     range   | used | free | used |      free      | used |                 free                 |
 *             0                                            `-- never used yet: no memory         end
 *
 * malloc keeps what is freed in pieces that fit nothing else, and a step with offloading frees and allocates every
 * activation. Here blocks are whole pages, a request takes the smallest free block that fits, and free neighbours are
 * merged. Blocks are page-aligned, so direct I/O needs no copy. They lie in huge pages where the kernel has them.
 *
 * Memory that was touched stays for the next request, because a first touch costs more than a fill. It goes back to the
 * kernel once it is idle: no block used it in the last `IDLE_PERIODS` periods. A period is a training step
 * (`allocator_end_of_step`) or, where no step ends for long, some seconds (`Range::tick`).
 *
 * Small tensors, and all when the range is full, come from the allocator that was there before. Blocks may outlive the
 * interpreter: nothing here is destroyed. A child process inherits the used blocks, copied on write.
 */
#include <c10/core/CPUAllocator.h>

#include <pthread.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <utility>
#include <vector>

namespace {

constexpr size_t CHUNK = size_t{2} << 20;   /* a huge page on most machines; the unit of giving back */
constexpr size_t GROWTH = size_t{32} << 20; /* bytes made accessible at a time */
constexpr uint32_t IDLE_PERIODS = 2;
constexpr int64_t PERIOD_S = 5, LONGEST_S = 60; /* without steps */
const size_t PAGE = static_cast<size_t>(sysconf(_SC_PAGESIZE));

size_t round_up(size_t nbytes, size_t unit) { return (nbytes + unit - 1) / unit * unit; }

/* Seconds since some time in the past. A call takes nanoseconds. */
int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
    return time.tv_sec;
}

/* Whether the kernel's huge pages are chunks. Larger ones would hold more than is asked for. */
bool huge_pages_are_chunks() {
    unsigned long long nbytes = 0;
    if (FILE *file = std::fopen("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "r")) {
        if (std::fscanf(file, "%llu", &nbytes) != 1) nbytes = 0;
        std::fclose(file);
    }
    return nbytes == CHUNK;
}

/* A range of addresses, cut into used and free blocks. Offsets are from the start of the range. */
class Range {
  public:
    /* Reserves addresses. They are not accessible, so they cost nothing yet. */
    bool reserve(size_t nbytes) {
        void *found = mmap(nullptr, nbytes + CHUNK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (found == MAP_FAILED) return false;
        start_ = reinterpret_cast<char *>(round_up(reinterpret_cast<size_t>(found), CHUNK));
        end_ = nbytes / CHUNK * CHUNK;
        used_in_.assign(end_ / CHUNK, NEVER);
        blocks_.emplace(0, Block{end_});
        by_size_.emplace(end_, 0);
        period_began_ = step_began_ = now();
        if (huge_pages_are_chunks()) madvise(start_, end_, MADV_HUGEPAGE); /* may fail: then it is only slower */
        return true;
    }

    bool owns(const void *address) const { return address >= start_ && address < start_ + end_; }

    /* A block of at least `nbytes`, or NULL if the range or the kernel has no room. */
    void *take(size_t nbytes) {
        if (nbytes > end_) return nullptr;
        size_t size = round_up(nbytes, PAGE);
        std::lock_guard<std::mutex> held(lock);
        tick();
        auto best = by_size_.lower_bound({size, 0});
        if (best == by_size_.end() || !make_accessible(best->second + size)) return nullptr;
        auto block = blocks_.find(best->second);
        if (block->second.size > size && !split(block, size)) return nullptr;
        claim(block);
        block->second.nbytes = nbytes;
        use(block);
        count(static_cast<int64_t>(nbytes));
        return start_ + block->first;
    }

    /* Frees a block. Destructors of tensors call this, so it takes no memory and throws nothing. */
    void give(void *address) {
        std::lock_guard<std::mutex> held(lock);
        auto block = blocks_.find(static_cast<size_t>(static_cast<char *>(address) - start_));
        if (block == blocks_.end() || is_free(block)) {
            std::fprintf(stderr, "ssd_fx: the memory of a CPU tensor at %p is freed, and is not in use\n", address);
            std::abort();
        }
        use(block);
        count(-static_cast<int64_t>(block->second.nbytes));
        if (auto behind = std::next(block); behind != blocks_.end() && is_free(behind)) {
            claim(behind);
            merge(block, behind);
        }
        if (block != blocks_.begin() && is_free(std::prev(block))) {
            auto before = std::prev(block);
            claim(before);
            merge(before, block);
            block = before;
        }
        put_back(block);
        tick();
    }

    /* Ends a step: gives back what is idle. */
    void end_of_step() {
        std::lock_guard<std::mutex> held(lock);
        int64_t time = now();
        step_s_ = time - step_began_;
        step_began_ = time;
        end_period(IDLE_PERIODS);
    }

    /* The next two are called with the lock held. */

    /* Ends the period if no step has ended for `PERIOD_S` and two steps' time: in inference, say. */
    void tick() {
        if (now() - period_began_ >= std::clamp(2 * step_s_, PERIOD_S, LONGEST_S)) end_period(IDLE_PERIODS);
    }

    /* Gives back the free chunks that no block used in the last `patience` periods. The next period begins. */
    void end_period(uint32_t patience) {
        for (auto [size, offset] : by_size_) {
            size_t behind = std::min(offset + size, usable_) / CHUNK;
            for (size_t chunk = round_up(offset, CHUNK) / CHUNK; chunk < behind; chunk++) {
                size_t first = chunk;
                while (chunk < behind && used_in_[chunk] != NEVER && used_in_[chunk] + patience <= period_) chunk++;
                if (chunk > first) give_back(first, chunk);
            }
        }
        shrink();
        period_++;
        period_began_ = now();
    }

    int64_t live() { std::lock_guard<std::mutex> held(lock); return live_; }
    int64_t take_peak() { std::lock_guard<std::mutex> held(lock); return std::exchange(peak_, live_); }
    int64_t touched() { std::lock_guard<std::mutex> held(lock); return static_cast<int64_t>(touched_); }
    void observe(void (*observer)(int64_t)) { std::lock_guard<std::mutex> held(lock); observer_ = observer; }

    std::mutex lock;

  private:
    using Places = std::set<std::pair<size_t, size_t>>; /* (size, offset) */
    struct Block {
        size_t size;                /* whole pages */
        size_t nbytes = 0;          /* as asked for */
        Places::node_type place{};  /* of a used block: its node of `by_size_`, so that to free it takes no memory */
    };
    using Blocks = std::map<size_t, Block>; /* by offset; they fill the range */
    static constexpr uint32_t NEVER = 0;    /* a chunk that has no memory */

    bool is_free(Blocks::iterator block) const { return block->second.place.empty(); }

    void claim(Blocks::iterator block) { block->second.place = by_size_.extract({block->second.size, block->first}); }

    void put_back(Blocks::iterator block) {
        block->second.place.value() = {block->second.size, block->first};
        by_size_.insert(std::move(block->second.place));
    }

    /* Makes one of two claimed blocks that are neighbours. */
    void merge(Blocks::iterator first, Blocks::iterator second) {
        first->second.size += second->second.size;
        blocks_.erase(second);
    }

    /* Cuts a free block after `size` bytes. Returns false, and changes nothing, if there is no memory for that. */
    bool split(Blocks::iterator block, size_t size) {
        size_t behind = block->first + size, rest = block->second.size - size;
        try {
            Places made{{rest, behind}}; /* memory is taken before anything changes */
            blocks_.emplace_hint(std::next(block), behind, Block{rest});
            by_size_.merge(made);
        } catch (const std::bad_alloc &) {
            return false;
        }
        claim(block);
        block->second.size = size;
        put_back(block);
        return true;
    }

    /* Makes [0, behind) accessible. */
    bool make_accessible(size_t behind) {
        if (behind <= usable_) return true;
        size_t wanted = std::min(round_up(behind, GROWTH), end_);
        if (mprotect(start_ + usable_, wanted - usable_, PROT_READ | PROT_WRITE)) return false;
        usable_ = wanted;
        return true;
    }

    /* Makes what has no memory at the end inaccessible again: a limit such as RLIMIT_DATA counts what is accessible. */
    void shrink() {
        size_t behind = usable_ / CHUNK;
        while (behind > 0 && used_in_[behind - 1] == NEVER) behind--;
        size_t wanted = std::min(round_up(behind * CHUNK, GROWTH), usable_);
        if (wanted < usable_ && !mprotect(start_ + wanted, usable_ - wanted, PROT_NONE)) usable_ = wanted;
    }

    /* Notes that a block is used in this period. */
    void use(Blocks::iterator block) {
        size_t behind = round_up(block->first + block->second.size, CHUNK) / CHUNK;
        for (size_t chunk = block->first / CHUNK; chunk < behind; chunk++) {
            if (used_in_[chunk] == NEVER) touched_ += CHUNK;
            used_in_[chunk] = period_;
        }
    }

    void give_back(size_t chunk, size_t behind) {
        if (madvise(start_ + chunk * CHUNK, (behind - chunk) * CHUNK, MADV_DONTNEED)) return;
        touched_ -= (behind - chunk) * CHUNK;
        std::fill(used_in_.begin() + chunk, used_in_.begin() + behind, NEVER);
    }

    void count(int64_t delta) {
        live_ += delta;
        peak_ = std::max(peak_, live_);
        if (observer_) observer_(delta);
    }

    char *start_ = nullptr;
    size_t end_ = 0, usable_ = 0, touched_ = 0;
    int64_t live_ = 0, peak_ = 0;
    uint32_t period_ = 1;
    int64_t period_began_ = 0, step_began_ = 0, step_s_ = 0;
    void (*observer_)(int64_t) = nullptr;
    Blocks blocks_;
    Places by_size_;                /* the free blocks */
    std::vector<uint32_t> used_in_; /* the last period that used each chunk */
};

/* None of these is ever destroyed: tensors may die after the destructors of the process have run. */
Range &range = *new Range;
c10::Allocator *other = nullptr; /* the one that was there before */

void release(void *address) {
    if (!range.owns(address)) {
        other->raw_deallocate(address);
        return;
    }
    c10::profiledCPUMemoryReporter().Delete(address);
    range.give(address);
}

class RangeAllocator final : public c10::Allocator {
  public:
    explicit RangeAllocator(size_t least) : least_(least) {}

    c10::DataPtr allocate(size_t nbytes) override {
        void *address = nbytes < least_ ? nullptr : range.take(nbytes);
        if (address) {
            c10::profiledCPUMemoryReporter().New(address, nbytes);
        } else {
            address = other->raw_allocate(nbytes);
        }
        return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &release; }

    void copy_data(void *target, const void *source, size_t nbytes) const override {
        default_copy_data(target, source, nbytes);
    }

  private:
    const size_t least_; /* smaller tensors are the other allocator's */
};

void before_fork() { range.lock.lock(); }
void in_parent() { range.lock.unlock(); }

/* The child gives back what is free. So no page of it is copied when the parent writes to it. */
void in_child() {
    range.end_period(0);
    range.lock.unlock();
}

} // namespace

extern "C" {

/* Makes this the allocator of CPU tensors of `least` bytes or more, with a range of `nbytes` of addresses. 0: cannot.
 * A second call changes nothing.
 */
int allocator_install(size_t least, size_t nbytes) {
    c10::Allocator *found = c10::GetCPUAllocator();
    if (other) return found->raw_deleter() == &release;
    RangeAllocator *ours = nullptr;
    try {
        if (!found->raw_deleter() || !range.reserve(nbytes)) return 0;
        ours = new RangeAllocator(least);
    } catch (const std::bad_alloc &) { /* no exception may reach Python's C code */
        return 0;
    }
    other = found;
    pthread_atfork(before_fork, in_parent, in_child);
    std::atomic_thread_fence(std::memory_order_release); /* other threads read torch's pointer without a lock */
    c10::SetCPUAllocator(ours);
    return c10::GetCPUAllocator() == ours; /* another one may have a higher priority */
}

void allocator_end_of_step(void) { range.end_of_step(); }

/* Gives back all that is free. */
void allocator_trim(void) {
    std::lock_guard<std::mutex> held(range.lock);
    range.end_period(0);
}

/* For a process that takes and frees nothing now: what is idle goes back here. */
void allocator_tick(void) {
    std::lock_guard<std::mutex> held(range.lock);
    range.tick();
}

int64_t allocator_live_bytes(void) { return range.live(); }
/* The most live bytes since the last call. */
int64_t allocator_take_peak(void) { return range.take_peak(); }
int allocator_owns(const void *address) { return range.owns(address); }
int64_t allocator_touched_bytes(void) { return range.touched(); }

/* `observer` is called with the bytes of each block that is taken, and with their negative when it is given back. */
void allocator_observe(void (*observer)(int64_t)) { range.observe(observer); }

} /* extern "C" */
