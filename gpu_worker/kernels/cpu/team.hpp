// One persistent team of threads: all run the same function, which shares out the items of each phase.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace dl {

class Worker;

// A phase ends when its items are done, not when every thread has come by: a helper that wakes late, or that the
// kernel took off its core between two items, holds nobody up and skips what is over. Between calls the helpers sleep;
// inside a call a thread without items spins for some microseconds and then sleeps too, since cores may be shared.
class Team {
 public:
  explicit Team(int num_threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return num_threads_; }

  // Runs fn(argument, worker) on every thread of the team that is there in time, the caller among them; returns when
  // all work is done and no thread touches the argument any more. Every thread must come by the same phases.
  void run(void (*fn)(void*, Worker&), void* argument);

 private:
  friend class Worker;

  // The next unclaimed item of one thread's share, under the number of the phase it counts for: share and phase change
  // together, so that a thread that is late by phases can never claim an item of another one.
  struct alignas(64) Claims {
    std::atomic<uint64_t> word{0};
  };
  static constexpr int kItemBits = 16;
  static constexpr uint64_t kItemMask = (uint64_t{1} << kItemBits) - 1;

  bool claim(int owner, uint64_t phase, uint64_t count, uint64_t* item);
  // Reports `items` more of a phase's `total` as done. The report that completes the phase runs last() first.
  template <class Last>
  bool complete(uint64_t phase, uint64_t items, uint64_t total, Last& last);
  bool is_over(uint64_t phase, uint64_t total, std::memory_order order) const;
  void wait_for(uint64_t phase, uint64_t total);
  void wake_waiting();
  void help(int thread);

  const int num_threads_;
  std::vector<std::thread> threads_;
  std::unique_ptr<Claims[]> claims_;
  void (*fn_)(void*, Worker&) = nullptr;
  void* argument_ = nullptr;
  uint64_t first_phase_ = 0;
  bool stop_ = false;
  alignas(64) std::atomic<uint32_t> job_{0};   // number of the latest call
  std::atomic<uint32_t> job_sleepers_{0};
  alignas(64) std::atomic<uint32_t> open_{0};  // number of the call that helpers may join, 0 for none
  alignas(64) std::atomic<uint32_t> active_{0};  // helpers inside the function
  std::atomic<uint32_t> active_sleepers_{0};
  // Low 32 bits of the phase's number << 32 | items done. Polled by whoever waits for the phase to be over.
  alignas(64) std::atomic<uint64_t> progress_{0};
  alignas(64) std::atomic<uint32_t> wakes_{0};  // futex of those who wait longer
  std::atomic<uint32_t> sleepers_{0};
};

// One thread's way through a call.
class Worker {
 public:
  Worker(Team& team, int thread, uint64_t phase) : team_(team), thread_(thread), phase_(phase) {}

  int thread() const { return thread_; }
  uint64_t phase() const { return phase_; }  // number of the last phase

  // fn(item) for each item in 0 .. n - 1, n >= 1, on whichever thread; then last() on one thread; then the next phase.
  // Each thread begins with a contiguous share of its own and then helps the others.
  template <class Fn, class Last>
  void phase(int64_t n, Fn&& fn, Last&& last) {
    const uint64_t phase = ++phase_;
    const auto total = static_cast<uint64_t>(n);
    if (team_.is_over(phase, total, std::memory_order_acquire)) return;
    const int threads = team_.num_threads_;
    for (int turn = 0; turn < threads; turn++) {
      const int owner = (thread_ + turn) % threads;
      const uint64_t done = take(owner, phase, n * owner / threads, n * (owner + 1) / threads, fn);
      if (done > 0 && team_.complete(phase, done, total, last)) return;
    }
    team_.wait_for(phase, total);
  }
  template <class Fn>
  void phase(int64_t n, Fn&& fn) {
    phase(n, fn, [] {});
  }

  // The same with items taken in order: for items of very different cost, sorted from dear to cheap.
  template <class Fn>
  void phase_in_order(int64_t n, Fn&& fn) {
    const uint64_t phase = ++phase_;
    const auto total = static_cast<uint64_t>(n);
    if (team_.is_over(phase, total, std::memory_order_acquire)) return;
    const uint64_t done = take(0, phase, 0, n, fn);
    const auto last = [] {};
    if (done == 0 || !team_.complete(phase, done, total, last)) team_.wait_for(phase, total);
  }

 private:
  template <class Fn>
  uint64_t take(int owner, uint64_t phase, int64_t begin, int64_t end, Fn& fn) {
    const int64_t grain = (end - begin) / static_cast<int64_t>(Team::kItemMask) + 1;
    const auto count = static_cast<uint64_t>((end - begin + grain - 1) / grain);
    uint64_t done = 0, index;
    while (team_.claim(owner, phase, count, &index)) {
      const int64_t first = begin + static_cast<int64_t>(index) * grain;
      const int64_t past = first + grain < end ? first + grain : end;
      for (int64_t item = first; item < past; item++) fn(item);
      done += static_cast<uint64_t>(past - first);
    }
    return done;
  }

  Team& team_;
  const int thread_;
  uint64_t phase_;
};

template <class Last>
bool Team::complete(uint64_t phase, uint64_t items, uint64_t total, Last& last) {
  const uint64_t tag = phase << 32;
  uint64_t value = progress_.load(std::memory_order_acquire);
  for (;;) {
    const uint64_t before = (value ^ tag) >> 32 == 0 ? value & 0xffffffff : 0;
    if (before + items == total) break;  // everybody else has reported: nobody changes the word any more
    if (progress_.compare_exchange_weak(value, tag | (before + items), std::memory_order_acq_rel)) return false;
  }
  last();
  progress_.store(tag | total);
  if (sleepers_.load() != 0) wake_waiting();
  return true;
}

inline bool Team::is_over(uint64_t phase, uint64_t total, std::memory_order order) const {
  const uint64_t value = progress_.load(order);
  const auto ahead = static_cast<int32_t>(static_cast<uint32_t>(value >> 32) - static_cast<uint32_t>(phase));
  return ahead > 0 || (ahead == 0 && (value & 0xffffffff) == total);
}

}  // namespace dl
