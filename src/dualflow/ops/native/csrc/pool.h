// One pool of threads for a model: a job is run by all of them, which meet at barriers inside it.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace df {

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits that are short on an idle machine and do not starve anyone on a busy one.
template <class Done> inline void spin_until(Done done) {
    for (int i = 0; !done(); i++) {
        if (i < 4000) relax();
        else std::this_thread::yield();
    }
}

class Pool {
  public:
    explicit Pool(int threads) : size_(threads) {
        for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
    }
    ~Pool() {
        stop_ = true;
        generation_.fetch_add(1);
        { std::lock_guard<std::mutex> lock(mutex_); }
        wake_.notify_all();
        for (auto &worker : workers_) worker.join();
    }
    int size() const { return size_; }

    // Runs job(thread) on every thread; the caller is thread 0.
    void run(const std::function<void(int)> &job) {
        if (size_ == 1) return job(0);
        job_ = &job;
        left_.store(size_ - 1, std::memory_order_relaxed);
        generation_.fetch_add(1);
        if (sleepers_.load() > 0) {
            { std::lock_guard<std::mutex> lock(mutex_); }
            wake_.notify_all();
        }
        job(0);
        spin_until([&] { return left_.load(std::memory_order_acquire) == 0; });
    }

    // All threads of a job meet here.
    void barrier() {
        if (size_ == 1) return;
        int phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
        } else {
            spin_until([&] { return phase_.load(std::memory_order_acquire) != phase; });
        }
    }

    // A counter that hands out pieces of uneven work; reset between two barriers by one thread.
    int take() { return next_.fetch_add(1, std::memory_order_relaxed); }
    void reset() { next_.store(0, std::memory_order_relaxed); }

  private:
    void work(int index) {
        int seen = 0;
        for (;;) {
            wait_for_job(seen);
            seen = generation_.load(std::memory_order_acquire);
            if (stop_) return;
            (*job_)(index);
            left_.fetch_sub(1, std::memory_order_acq_rel);
        }
    }
    // Between two steps of a busy engine the pause is short: spin a while before sleeping.
    void wait_for_job(int seen) {
        auto ready = [&] { return generation_.load() != seen; };  // in one order with sleepers_
        for (int i = 0; i < 30000; i++) {
            if (ready()) return;
            relax();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, ready);
        sleepers_.fetch_sub(1);
    }

    int size_;
    std::vector<std::thread> workers_;
    const std::function<void(int)> *job_ = nullptr;
    std::atomic<bool> stop_{false};
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
    alignas(64) std::atomic<int> generation_{0};
    alignas(64) std::atomic<int> left_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> phase_{0};
    alignas(64) std::atomic<int> next_{0};
};

}  // namespace df
