#include "team.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <string>

#include "error.hpp"

namespace dl {

namespace {

// About 20 to 40 microseconds: longer than the usual wait for a phase, shorter than a time slice.
constexpr int kSpins = 1500;

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

template <class Ready>
bool spin_until(Ready ready) {
  for (int i = 0; i < kSpins; i++) {
    if (ready()) return true;
    relax();
  }
  return false;
}

template <class Ready>
void wait_until(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers, Ready ready) {
  if (spin_until([&] { return ready(word.load(std::memory_order_acquire)); })) return;
  sleepers.fetch_add(1);
  for (uint32_t value = word.load(); !ready(value); value = word.load()) futex_wait(word, value);
  sleepers.fetch_sub(1);
}

// After a sequentially consistent change of `word`: either a sleeper is seen here, or it saw the change.
void wake(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers) {
  if (sleepers.load() != 0) futex_wake(word);
}

}  // namespace

Team::Team(int num_threads) : num_threads_(num_threads) {
  require(num_threads >= 1 && num_threads <= 1024, "num_threads: " + std::to_string(num_threads) + " is not in 1..1024");
  claims_ = std::make_unique<Claims[]>(static_cast<size_t>(num_threads));
  for (int thread = 1; thread < num_threads; thread++) threads_.emplace_back([this, thread] { help(thread); });
}

Team::~Team() {
  stop_ = true;
  job_.fetch_add(1);
  wake(job_, job_sleepers_);
  for (auto& thread : threads_) thread.join();
}

void Team::run(void (*fn)(void*, Worker&), void* argument) {
  fn_ = fn;
  argument_ = argument;
  uint32_t number = job_.load(std::memory_order_relaxed) + 1;
  if (number == 0) number = 1;  // 0 means that no call is open
  open_.store(number);
  job_.store(number);
  wake(job_, job_sleepers_);
  Worker worker(*this, 0, first_phase_);
  fn(argument, worker);
  open_.store(0);
  wait_until(active_, active_sleepers_, [](uint32_t helpers) { return helpers == 0; });
  first_phase_ = worker.phase();
}

void Team::help(int thread) {
  uint32_t seen = 0;
  for (;;) {
    wait_until(job_, job_sleepers_, [seen](uint32_t number) { return number != seen; });
    seen = job_.load();
    if (stop_) return;
    // Joining and closing are both sequentially consistent: a helper that finds the call open is waited for.
    active_.fetch_add(1);
    if (open_.load() == seen) {
      Worker worker(*this, thread, first_phase_);
      fn_(argument_, worker);
    }
    if (active_.fetch_sub(1) == 1) wake(active_, active_sleepers_);
  }
}

bool Team::claim(int owner, uint64_t phase, uint64_t count, uint64_t* item) {
  auto& word = claims_[owner].word;
  uint64_t value = word.load(std::memory_order_relaxed);
  for (;;) {
    const uint64_t counts_for = value >> kItemBits;
    if (counts_for > phase) return false;  // this thread is late: the phase is over
    const uint64_t next = counts_for == phase ? value & kItemMask : 0;
    if (next >= count) return false;
    if (word.compare_exchange_weak(value, phase << kItemBits | (next + 1), std::memory_order_relaxed)) {
      *item = next;
      return true;
    }
  }
}

void Team::wait_for(uint64_t phase, uint64_t total) {
  if (spin_until([&] { return is_over(phase, total, std::memory_order_acquire); })) return;
  sleepers_.fetch_add(1);
  for (;;) {
    const uint32_t seen = wakes_.load();
    if (is_over(phase, total, std::memory_order_seq_cst)) break;
    futex_wait(wakes_, seen);
  }
  sleepers_.fetch_sub(1);
}

void Team::wake_waiting() {
  wakes_.fetch_add(1);
  futex_wake(wakes_);
}

}  // namespace dl
