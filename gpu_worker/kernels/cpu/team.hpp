// One persistent team of threads: all run the same function, share the items of each phase, meet at barriers.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace dl {

// Between calls the helpers sleep in the kernel. Inside a call they spin for a few microseconds at a barrier and then
// sleep too, since the cores may be shared with other processes.
class Team {
 public:
  explicit Team(int num_threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return num_threads_; }

  // Runs fn(argument, thread) on every thread of the team, the caller being thread 0; returns when all are done.
  void run(void (*fn)(void*, int), void* argument);

  // Called by every thread with the same n: fn(item) for each item in 0 .. n - 1, then a barrier. Each thread starts
  // on a contiguous range of its own and then helps the others.
  template <class Fn>
  void phase(int thread, int64_t n, Fn&& fn) {
    for (int turn = 0; turn < num_threads_; turn++) {
      const int owner = (thread + turn) % num_threads_;
      const int64_t begin = n * owner / num_threads_, end = n * (owner + 1) / num_threads_;
      take(owner, begin, end, fn);
    }
    barrier();
  }

  // The same with items taken strictly in order: for items of very different cost, sorted from dear to cheap.
  template <class Fn>
  void phase_in_order(int64_t n, Fn&& fn) {
    take(0, 0, n, fn);
    barrier();
  }

  // Returns when all threads have called it.
  void barrier();

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
  };

  template <class Fn>
  void take(int owner, int64_t begin, int64_t end, Fn& fn) {
    auto& next = counters_[owner].next;
    if (begin >= end || next.load(std::memory_order_relaxed) >= end - begin) return;
    for (;;) {
      const int64_t item = begin + next.fetch_add(1, std::memory_order_relaxed);
      if (item >= end) return;
      fn(item);
    }
  }

  void work(int thread);

  const int num_threads_;
  std::vector<std::thread> threads_;
  std::unique_ptr<Counter[]> counters_;
  void (*fn_)(void*, int) = nullptr;
  void* argument_ = nullptr;
  bool stop_ = false;
  alignas(64) std::atomic<uint32_t> job_{0};  // counts calls; helpers wait for it to change
  alignas(64) std::atomic<uint32_t> job_sleepers_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};  // counts barriers
  alignas(64) std::atomic<int32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> barrier_sleepers_{0};
};

}  // namespace dl
