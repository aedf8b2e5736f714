// A whole greedy chain of drafts in one call: each step's best token and hidden state are the next step's input.
#include <algorithm>
#include <string>
#include <vector>

#include "error.hpp"
#include "head.hpp"
#include "model.hpp"

using namespace dl;

namespace {

std::string number(int64_t value) { return std::to_string(value); }

// The sequences that still run, as a batch of one row each.
class ChainBatch {
 public:
  ChainBatch(const DlChain& chain, int64_t hidden)
      : chain_(chain),
        hidden_(hidden),
        tokens_(chain.input_ids, chain.input_ids + chain.num_sequences),
        features_(chain.hidden, chain.hidden + chain.num_sequences * hidden),
        next_(features_.size()),
        other_(features_.size()) {
    for (int32_t d = 0; d < chain.num_sequences; d++) running_.push_back(d);
  }

  // Drops the sequences that are done before step `step`; false if none is left.
  bool begin(int64_t step) {
    size_t kept = 0;
    for (size_t row = 0; row < running_.size(); row++) {
      if (chain_.counts[running_[row]] <= step) continue;
      if (kept != row) {
        running_[kept] = running_[row];
        tokens_[kept] = tokens_[row];
        const auto width = static_cast<size_t>(hidden_);
        std::copy_n(features_.data() + row * width, width, features_.data() + kept * width);
      }
      kept++;
    }
    if (step == 0 || kept < running_.size()) place_pages(kept);
    running_.resize(kept);
    positions_.clear();
    slots_.clear();
    kv_lens_.clear();
    for (const int32_t d : running_) {
      const int64_t index = chain_.kv_lens[d] + step - 1;
      const int64_t page = chain_.page_indices[chain_.page_indptr[d] + index / chain_.page_size];
      positions_.push_back(chain_.positions[d] + step);
      slots_.push_back(page * chain_.page_size + index % chain_.page_size);
      kv_lens_.push_back(static_cast<int32_t>(index + 1));
    }
    return kept > 0;
  }

  int64_t size() const { return static_cast<int64_t>(running_.size()); }
  int32_t sequence(int64_t row) const { return running_[static_cast<size_t>(row)]; }
  DlBatch batch() const {
    return {size(),           chain_.page_size,    tokens_.data(), positions_.data(), slots_.data(), row_indptr_.data(),
            kv_lens_.data(), page_indptr_.data(), pages_.data(),  nullptr,           nullptr};
  }
  // Where the step's outputs go: what the head reads, and the other of the two.
  DlRows rows(bool recycles_normed) {
    return {features_.data(), 1, 0, nullptr, recycles_normed ? next_.data() : other_.data(),
            recycles_normed ? nullptr : next_.data(), nullptr};
  }
  void end(int64_t row, int64_t token) { tokens_[static_cast<size_t>(row)] = token; }
  void end() { features_.swap(next_); }

 private:
  void place_pages(size_t count) {
    row_indptr_.assign(1, 0);
    page_indptr_.assign(1, 0);
    pages_.clear();
    for (size_t row = 0; row < count; row++) {
      const int32_t d = running_[row];
      pages_.insert(pages_.end(), chain_.page_indices + chain_.page_indptr[d],
                    chain_.page_indices + chain_.page_indptr[d + 1]);
      row_indptr_.push_back(static_cast<int32_t>(row + 1));
      page_indptr_.push_back(static_cast<int32_t>(pages_.size()));
    }
  }

  const DlChain& chain_;
  const int64_t hidden_;
  std::vector<int32_t> running_;  // by row: the sequence
  std::vector<int64_t> tokens_, positions_, slots_;
  std::vector<int32_t> kv_lens_, row_indptr_, page_indptr_, pages_;
  std::vector<float> features_, next_, other_;  // [rows, hidden]
};

}  // namespace

void DlModel::check_output(const DlLinear& lm_head, const int64_t* target_ids) const {
  require(lm_head.k == desc_.hidden,
          "lm_head: of " + number(lm_head.k) + " inputs, expected " + number(desc_.hidden));
  check_group(lm_head.format, desc_.activation_group);
  for (int64_t i = 0; target_ids != nullptr && i < lm_head.n; i++) {
    const int64_t id = target_ids[i];
    if (id >= 0 && id < desc_.vocab) continue;  // thousands of them: no message is made for those that are right
    throw Error("target_ids: " + number(id) + " is not in 0.." + number(desc_.vocab - 1));
  }
  require(target_ids != nullptr || lm_head.n <= desc_.vocab,
          "lm_head: " + number(lm_head.n) + " columns, the embedding has " + number(desc_.vocab) + " rows");
}

void DlModel::check_chain(const DlChain& chain) const {
  require(draft_input_.has_value(), "chain: only draft heads run chains");
  require(chain.page_size >= 1, "page_size: " + number(chain.page_size) + " is not positive");
  check_output(*chain.lm_head, chain.target_ids);
  for (int64_t d = 0; d < chain.num_sequences; d++) {
    const std::string sequence = " of sequence " + number(d);
    const int64_t steps = chain.counts[d], last = chain.kv_lens[d] + steps - 1;
    require(steps >= 0 && steps <= chain.num_steps,
            "counts: " + number(steps) + sequence + " is not in 0.." + number(chain.num_steps));
    require(chain.kv_lens[d] >= 1, "kv_lens: " + number(chain.kv_lens[d]) + sequence + " leaves no slot to write");
    const int64_t pages = int64_t{chain.page_indptr[d + 1]} - chain.page_indptr[d];
    require(pages * chain.page_size >= last,
            "page_indptr: " + number(pages) + " pages" + sequence + " do not hold " + number(last) + " keys");
    require(chain.positions[d] + std::max<int64_t>(steps, 1) <= desc_.num_positions,
            "positions: " + number(chain.positions[d]) + sequence + " and " + number(steps) + " steps pass " +
                number(desc_.num_positions - 1));
  }
}

void DlModel::run_chain(Team& team, const DlPool& pool, const DlChain& chain, int64_t* tokens_out) {
  check_chain(chain);
  std::fill_n(tokens_out, chain.num_sequences * chain.num_steps, int64_t{-1});
  ChainBatch running(chain, desc_.hidden);
  const bool recycles_normed = draft_input_->recycles_normed != 0;
  std::vector<int64_t> best(static_cast<size_t>(chain.num_sequences));
  std::vector<float> logits(best.size());
  for (int64_t step = 0; step < chain.num_steps && running.begin(step); step++) {
    const DlBatch batch = running.batch();
    const DlRows rows = running.rows(recycles_normed);
    forward(team, pool, batch, rows);
    run_topk(*chain.lm_head, team, kernels_, desc_.activation_group, rows.hidden_out, running.size(), 1, best.data(),
             logits.data(), nullptr);
    for (int64_t row = 0; row < running.size(); row++) {
      const int64_t column = best[static_cast<size_t>(row)];
      const int64_t token = chain.target_ids == nullptr ? column : chain.target_ids[column];
      tokens_out[running.sequence(row) * chain.num_steps + step] = token;
      running.end(row, token);
    }
    running.end();
  }
}
