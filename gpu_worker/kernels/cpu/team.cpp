#include "team.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <string>

#include "error.hpp"

namespace dl {

namespace {

// About 20 to 40 microseconds: longer than the usual wait at a barrier, shorter than a time slice.
constexpr int kSpins = 1500;

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

void wait_for_change(std::atomic<uint32_t>& word, uint32_t old, std::atomic<uint32_t>& sleepers) {
  for (int i = 0; i < kSpins; i++) {
    if (word.load(std::memory_order_acquire) != old) return;
    relax();
  }
  sleepers.fetch_add(1);
  while (word.load() == old) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
  }
  sleepers.fetch_sub(1);
}

// The store and the load below are sequentially consistent: either the sleeper is seen here, or it sees the change.
void announce(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers) {
  word.fetch_add(1);
  if (sleepers.load() != 0) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
}

}  // namespace

Team::Team(int num_threads) : num_threads_(num_threads) {
  require(num_threads >= 1 && num_threads <= 1024, "num_threads: " + std::to_string(num_threads) + " is not in 1..1024");
  counters_ = std::make_unique<Counter[]>(static_cast<size_t>(num_threads));
  for (int thread = 1; thread < num_threads; thread++) threads_.emplace_back([this, thread] { work(thread); });
}

Team::~Team() {
  stop_ = true;
  announce(job_, job_sleepers_);
  for (auto& thread : threads_) thread.join();
}

void Team::run(void (*fn)(void*, int), void* argument) {
  fn_ = fn;
  argument_ = argument;
  announce(job_, job_sleepers_);
  fn(argument, 0);
  barrier();  // nobody touches the argument after this
}

void Team::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    wait_for_change(job_, seen, job_sleepers_);
    seen++;
    if (stop_) return;
    fn_(argument_, thread);
    barrier();
  }
}

void Team::barrier() {
  if (num_threads_ == 1) {
    counters_[0].next.store(0, std::memory_order_relaxed);
    return;
  }
  const uint32_t generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
    arrived_.store(0, std::memory_order_relaxed);
    for (int i = 0; i < num_threads_; i++) counters_[i].next.store(0, std::memory_order_relaxed);
    announce(generation_, barrier_sleepers_);
  } else {
    wait_for_change(generation_, generation, barrier_sleepers_);
  }
}

}  // namespace dl
