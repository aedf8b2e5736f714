#include "head.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "error.hpp"
#include "linear_work.hpp"
#include "workspace.hpp"

namespace dl {

namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Columns that a thread scans at a time; log-sum-exp adds up strips in order, so this is part of the result.
constexpr int64_t kStripBlocks = 16;
constexpr int64_t kStripColumns = kStripBlocks * kLanes;
constexpr int64_t kStripRows = 48;

struct Candidate {
  float logit;
  int64_t id;
};

bool better(const Candidate& a, const Candidate& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

// The k best seen so far, best first.
class Best {
 public:
  explicit Best(size_t k) : k_(k) { kept_.reserve(k + 1); }
  void offer(const Candidate& candidate) {
    if (kept_.size() == k_ && !better(candidate, kept_.back())) return;
    kept_.insert(std::upper_bound(kept_.begin(), kept_.end(), candidate, better), candidate);
    if (kept_.size() > k_) kept_.pop_back();
  }
  float bar() const { return kept_.size() < k_ ? kLowest : kept_.back().logit; }
  const std::vector<Candidate>& kept() const { return kept_; }

 private:
  size_t k_;
  std::vector<Candidate> kept_;
};

class TopK {
 public:
  TopK(const DlLinear& head, Team& team, const Kernels& kernels, int64_t rows, size_t k, bool with_lse)
      : head_(head),
        kernels_(kernels),
        rows_(rows),
        strips_(ceil_div(head.n, kStripColumns)),
        threads_(static_cast<size_t>(team.size())),
        best_(static_cast<size_t>(team.size() * rows), Best(k)),
        scratch_(threads_ * static_cast<size_t>(std::min(rows, kStripRows) * kStripColumns)) {
    if (with_lse) sums_.resize(static_cast<size_t>(rows * strips_));
  }

  int64_t items() const { return strips_; }

  void scan(const Activations& x, int64_t strip, int thread) {
    const WeightView view = head_.view();
    const int64_t block0 = strip * kStripBlocks, block1 = std::min(block0 + kStripBlocks, head_.blocks);
    const int64_t columns = std::min(kStripColumns, head_.n - strip * kStripColumns);
    float* out = scratch_.data() + thread * std::min(rows_, kStripRows) * kStripColumns;
    for (int64_t row0 = 0; row0 < rows_; row0 += kStripRows) {
      const int64_t count = std::min(kStripRows, rows_ - row0);
      kernels_.linear(view, block0, block1, x, row0, count, nullptr, out, kStripColumns);
      for (int64_t r = 0; r < count; r++) keep(out + r * kStripColumns, columns, strip, row0 + r, thread);
    }
  }

  // Row by row, strips in ascending order: the same sum whatever thread scanned them.
  void collect(int64_t row, int32_t k, int64_t* ids, float* logits, float* lse) {
    Best all(static_cast<size_t>(k));
    for (size_t thread = 0; thread < threads_; thread++) {
      for (const Candidate& candidate : best_[thread * static_cast<size_t>(rows_) + static_cast<size_t>(row)].kept()) {
        all.offer(candidate);
      }
    }
    for (size_t i = 0; i < all.kept().size(); i++) {
      ids[row * k + static_cast<int64_t>(i)] = all.kept()[i].id;
      logits[row * k + static_cast<int64_t>(i)] = all.kept()[i].logit;
    }
    if (lse == nullptr) return;
    float maximum = kLowest, total = 0.0f;
    for (int64_t strip = 0; strip < strips_; strip++) {
      const Sum& sum = sums_[static_cast<size_t>(row * strips_ + strip)];
      kernels_.merge_exp_sum(&maximum, &total, sum.maximum, sum.total);
    }
    lse[row] = maximum + std::log(total);
  }

 private:
  struct Sum {
    float maximum, total;
  };

  void keep(const float* x, int64_t n, int64_t strip, int64_t row, int thread) {
    float maximum;
    int64_t index;
    kernels_.largest(x, n, &maximum, &index);
    if (!sums_.empty()) {
      sums_[static_cast<size_t>(row * strips_ + strip)] = {maximum, kernels_.exp_sum(x, n, maximum)};
    }
    Best& best = best_[static_cast<size_t>(thread * rows_ + row)];
    if (maximum < best.bar()) return;
    for (int64_t i = index; i < n; i++) {
      if (x[i] >= best.bar()) best.offer({x[i], strip * kStripColumns + i});
    }
    for (int64_t i = 0; i < index; i++) {
      if (x[i] >= best.bar()) best.offer({x[i], strip * kStripColumns + i});
    }
  }

  const DlLinear& head_;
  const Kernels& kernels_;
  const int64_t rows_, strips_;
  const size_t threads_;
  std::vector<Best> best_;  // [threads, rows]
  std::vector<float> scratch_;
  std::vector<Sum> sums_;  // [rows, strips]
};

template <class Fn>
void run_on(Team& team, Fn&& fn) {
  team.run([](void* argument, Worker& worker) { (*static_cast<Fn*>(argument))(worker); }, &fn);
}

}  // namespace

void run_linear(const DlLinear& linear, Team& team, const Kernels& kernels, int32_t group, const float* x,
                int64_t rows, float* y) {
  check_group(linear.format, group);
  if (rows == 0) return;
  ActivationRing ring;
  ring.reserve(1, rows, linear.k, kernels);
  const Activations input = ring.at(0, linear.k, linear.format, group);
  const LinearWork work(linear, rows);
  run_on(team, [&](Worker& worker) {
    worker.phase(rows, [&](int64_t row) { kernels.quantise(x + row * linear.k, 0, linear.k, input, row); });
    worker.phase(work.items(),
               [&](int64_t item) { work.run(kernels, input, nullptr, y, linear.n, item); });
  });
}

void run_topk(const DlLinear& head, Team& team, const Kernels& kernels, int32_t group, const float* hidden,
              int64_t rows, int32_t k, int64_t* ids, float* logits, float* lse) {
  check_group(head.format, group);
  require(k >= 1 && k <= 64 && k <= head.n, "count: " + std::to_string(k) + " is not in 1..64 or above the " + std::to_string(head.n) + " columns");
  if (rows == 0) return;
  ActivationRing ring;
  ring.reserve(1, rows, head.k, kernels);
  const Activations input = ring.at(0, head.k, head.format, group);
  TopK topk(head, team, kernels, rows, static_cast<size_t>(k), lse != nullptr);
  run_on(team, [&](Worker& worker) {
    worker.phase(rows, [&](int64_t row) { kernels.quantise(hidden + row * head.k, 0, head.k, input, row); });
    worker.phase(topk.items(), [&](int64_t strip) { topk.scan(input, strip, worker.thread()); });
    worker.phase(rows, [&](int64_t row) { topk.collect(row, k, ids, logits, lse); });
  });
}

}  // namespace dl
