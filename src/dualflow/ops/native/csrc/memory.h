// Large blocks for weights and cache: huge pages where the system gives them (a third less time to read
// on x86), and left untouched, so that the thread that uses a part is the one that places it.
#pragma once
#include <new>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace df {

class Memory {
  public:
    Memory() = default;
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;
    ~Memory() {
#if defined(__linux__)
        if (data_) munmap(data_, mapped_);
#else
        free(data_);
#endif
    }
    // Zeroed bytes. Throws std::bad_alloc.
    uint8_t *allocate(size_t bytes) {
        constexpr size_t huge = (size_t)2 << 20;
        size_ = bytes;
        mapped_ = (bytes + huge - 1) / huge * huge + huge;
#if defined(__linux__)
        void *at = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) throw std::bad_alloc();
        data_ = at;
        madvise(at, mapped_, MADV_HUGEPAGE);
        return (uint8_t *)(((uintptr_t)at + huge - 1) / huge * huge);
#else
        data_ = calloc(1, mapped_);
        if (!data_) throw std::bad_alloc();
        return (uint8_t *)(((uintptr_t)data_ + 63) / 64 * 64);
#endif
    }
    size_t size() const { return size_; }

  private:
    void *data_ = nullptr;
    size_t size_ = 0, mapped_ = 0;
};

}  // namespace df
