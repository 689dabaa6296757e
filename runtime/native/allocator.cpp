/* The memory of large CPU tensors: c10's CPU allocator, with the pages of one range of addresses.
 *
 *     range   | used | free | used |      free      | used |            never used yet            |
 *             0                                            top                                    end
 *
 * malloc keeps what is freed in pieces that fit nothing else, and a step with offloading frees and allocates every
 * activation. Here blocks are whole pages, a request takes the smallest free block that fits, and free neighbours are
 * merged. Blocks are page-aligned, so direct I/O needs no copy. They lie in huge pages where the kernel has them.
 *
 * Memory that was touched stays for the next request, because a first touch costs more than a fill. The steps show what
 * is idle: a huge page that no block used in the last `PATIENCE` steps goes back to the kernel (`end_of_step`).
 *
 * Small tensors, and all when the range is full, come from the allocator that was there before. Blocks may outlive the
 * interpreter: nothing here is destroyed. A child process inherits the range, copied on write.
 */
#include <c10/core/CPUAllocator.h>

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr size_t PAGE = 4096;
constexpr size_t CHUNK = size_t{2} << 20; /* a huge page on most machines; the unit of giving back */
constexpr size_t GROWTH = size_t{32} << 20; /* bytes made accessible at a time */
constexpr uint32_t PATIENCE = 2;

size_t round_up(size_t nbytes, size_t unit) { return (nbytes + unit - 1) / unit * unit; }

/* Blocks of a range of addresses. Offsets are from the start of the range. */
class Range {
  public:
    /* Reserves addresses. They are not accessible, so no limit of memory counts them yet. */
    bool reserve(size_t nbytes) {
        void *found = mmap(nullptr, nbytes + CHUNK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (found == MAP_FAILED) return false;
        start_ = reinterpret_cast<char *>(round_up(reinterpret_cast<size_t>(found), CHUNK));
        end_ = nbytes / CHUNK * CHUNK;
        used_in_.assign(end_ / CHUNK, NEVER);
        madvise(start_, end_, MADV_HUGEPAGE); /* may fail: a kernel without huge pages is only slower */
        return true;
    }

    bool owns(const void *address) const {
        return address >= start_ && address < start_ + end_;
    }

    /* A block of at least `nbytes`, or NULL if the range or the kernel has no room. */
    void *take(size_t nbytes) {
        size_t size = round_up(nbytes, PAGE);
        std::lock_guard<std::mutex> held(lock);
        size_t offset = 0;
        auto best = by_size_.lower_bound({size, 0});
        if (best != by_size_.end()) {
            auto [length, at] = *best;
            offset = at;
            forget(at, length);
            if (length > size) remember(at + size, length - size);
        } else {
            size_t length = 0;
            offset = top_;
            if (!by_offset_.empty()) {
                auto last = std::prev(by_offset_.end());
                if (last->first + last->second == top_) std::tie(offset, length) = std::pair(last->first, last->second);
            }
            if (!grow(offset + size)) return nullptr;
            if (length) forget(offset, length);
            top_ = offset + size;
        }
        blocks_.emplace(offset, Block{nbytes, size});
        use(offset, size);
        count(static_cast<int64_t>(nbytes));
        return start_ + offset;
    }

    void give(void *address) {
        std::lock_guard<std::mutex> held(lock);
        size_t offset = static_cast<size_t>(static_cast<char *>(address) - start_);
        auto found = blocks_.find(offset);
        auto [nbytes, size] = found->second;
        blocks_.erase(found);
        use(offset, size);
        count(-static_cast<int64_t>(nbytes));
        auto behind = by_offset_.find(offset + size);
        if (behind != by_offset_.end()) {
            size += behind->second;
            forget(behind->first, behind->second);
        }
        auto before = by_offset_.lower_bound(offset);
        if (before != by_offset_.begin() && (--before)->first + before->second == offset) {
            size += before->second;
            offset = before->first;
            forget(offset, before->second);
        }
        remember(offset, size);
    }

    /* Gives back what no block used in the last `patience` steps, and counts the next step. Returns the bytes. */
    size_t end_of_step(uint32_t patience) {
        std::lock_guard<std::mutex> held(lock);
        size_t given = 0;
        for (auto [offset, length] : by_offset_) {
            size_t behind = (offset + length) / CHUNK;
            for (size_t chunk = round_up(offset, CHUNK) / CHUNK; chunk < behind; chunk++) {
                if (used_in_[chunk] == NEVER || used_in_[chunk] + patience > step_) continue;
                if (madvise(start_ + chunk * CHUNK, CHUNK, MADV_DONTNEED)) continue;
                used_in_[chunk] = NEVER;
                given += CHUNK;
            }
        }
        touched_ -= given;
        step_++;
        return given;
    }

    int64_t live() { std::lock_guard<std::mutex> held(lock); return live_; }
    int64_t touched() { std::lock_guard<std::mutex> held(lock); return static_cast<int64_t>(touched_); }
    void observe(void (*observer)(int64_t)) { std::lock_guard<std::mutex> held(lock); observer_ = observer; }

    std::mutex lock;

  private:
    struct Block { size_t nbytes, size; }; /* as asked for, and in whole pages */
    static constexpr uint32_t NEVER = 0;   /* a chunk that has no memory */

    void remember(size_t offset, size_t length) {
        by_offset_.emplace(offset, length);
        by_size_.emplace(length, offset);
    }

    void forget(size_t offset, size_t length) {
        by_size_.erase({length, offset});
        by_offset_.erase(offset);
    }

    /* Makes [0, behind) accessible. */
    bool grow(size_t behind) {
        if (behind <= usable_) return true;
        size_t wanted = std::min(round_up(behind, GROWTH), end_);
        if (behind > end_ || mprotect(start_ + usable_, wanted - usable_, PROT_READ | PROT_WRITE)) return false;
        usable_ = wanted;
        return true;
    }

    /* Notes that a block at `offset` is used in this step. */
    void use(size_t offset, size_t size) {
        for (size_t chunk = offset / CHUNK; chunk < round_up(offset + size, CHUNK) / CHUNK; chunk++) {
            if (used_in_[chunk] == NEVER) touched_ += CHUNK;
            used_in_[chunk] = step_;
        }
    }

    void count(int64_t delta) {
        live_ += delta;
        if (observer_) observer_(delta);
    }

    char *start_ = nullptr;
    size_t end_ = 0, usable_ = 0, top_ = 0, touched_ = 0;
    int64_t live_ = 0;
    uint32_t step_ = 1;
    void (*observer_)(int64_t) = nullptr;
    std::map<size_t, size_t> by_offset_;          /* free blocks: their length */
    std::set<std::pair<size_t, size_t>> by_size_; /* the same: (length, offset) */
    std::unordered_map<size_t, Block> blocks_;    /* used blocks, by offset */
    std::vector<uint32_t> used_in_;               /* the last step that used each chunk */
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
void after_fork() { range.lock.unlock(); }

} // namespace

extern "C" {

/* Makes this the allocator of CPU tensors of `least` bytes or more, with a range of `nbytes` of addresses. 0: cannot. */
int allocator_install(size_t least, size_t nbytes) {
    c10::Allocator *found = c10::GetCPUAllocator();
    if (!found->raw_deleter() || !range.reserve(nbytes)) return 0;
    other = found;
    pthread_atfork(before_fork, after_fork, after_fork);
    auto *ours = new RangeAllocator(least);
    c10::SetCPUAllocator(ours);
    return c10::GetCPUAllocator() == ours; /* another one may have a higher priority */
}

/* Gives idle memory back to the kernel: what the last steps did not use or, with `all`, everything idle. */
size_t allocator_end_of_step(int all) { return range.end_of_step(all ? 0 : PATIENCE); }

int64_t allocator_live_bytes(void) { return range.live(); }
int64_t allocator_touched_bytes(void) { return range.touched(); }
int allocator_owns(const void *address) { return range.owns(address); }

/* `observer` is called with the bytes of each block that is taken, and with their negative when it is given back. */
void allocator_observe(void (*observer)(int64_t)) { range.observe(observer); }

} /* extern "C" */
