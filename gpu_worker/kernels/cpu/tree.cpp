// A dynamic draft tree per sequence in one call (EAGLE-2, arXiv 2406.16858, sections 4.1 and 4.2): expand the most
// probable nodes level by level, then keep the best of all. gpu_worker/drafting/tree_growth.py does the same in steps.
// With one child a node it is a chain. Where the target will draw with coupled noise (gpu_worker/sampling/random.py), so do
// the drafts: the children of a node are the largest of log q + noise.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "draws.hpp"
#include "error.hpp"
#include "head.hpp"
#include "model.hpp"

using namespace dl;

namespace {

std::string number(int64_t value) { return std::to_string(value); }

// As in gpu_worker/sampling/law.py.
constexpr int32_t kNumContenders = 8;
constexpr float kSureFactor = 0.75f, kSureExponent = 1.4f;

struct Node {
  int64_t token;
  int32_t parent;  // index of an earlier node; -1: the root
  int32_t depth;   // 1 behind the root
  double value;    // sum of the draft's log-probabilities down to it
};

int32_t levels_of(const DlTree& tree, int32_t budget) { return std::min(tree.max_depth, budget); }

// Nodes that are expanded per level: all levels' together fit the slots that the budget reserves.
int32_t width_of(const DlTree& tree, int32_t budget) {
  if (tree.max_children == 1) return 1;
  return std::max(1, budget / std::max(1, levels_of(tree, budget) - 1));
}

// One sequence's tree while it grows.
struct Growing {
  int32_t sequence;
  int64_t length;  // known tokens: index and position of the first draft token
  int32_t budget, levels, width;
  std::vector<Node> nodes;
  std::vector<int32_t> expanded;  // nodes, in order of expansion: the head's rows
  size_t beam = 0;                // how many of them are the newest level's
  std::vector<float> outputs;     // [rows that ran, hidden]: what the head gave to recycle

  // The most valuable `width` of the nodes from `first` on are expanded next, in order of their numbers.
  void choose_beam(size_t first) {
    std::vector<int32_t> candidates(nodes.size() - first);
    std::iota(candidates.begin(), candidates.end(), static_cast<int32_t>(first));
    std::stable_sort(candidates.begin(), candidates.end(),
                     [&](int32_t a, int32_t b) { return nodes[a].value > nodes[b].value; });
    candidates.resize(std::min(candidates.size(), static_cast<size_t>(width)));
    std::sort(candidates.begin(), candidates.end());
    beam = candidates.size();
    expanded.insert(expanded.end(), candidates.begin(), candidates.end());
  }

  // Nodes to verify, parents first; parents count among them.
  std::vector<Node> best() const {
    std::vector<int32_t> order(nodes.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      if (nodes[a].value != nodes[b].value) return nodes[a].value > nodes[b].value;
      return nodes[a].depth < nodes[b].depth;
    });
    order.resize(std::min(order.size(), static_cast<size_t>(budget)));
    std::sort(order.begin(), order.end());
    std::vector<int32_t> place(nodes.size(), -1);
    std::vector<Node> kept;
    for (const int32_t node : order) {
      place[node] = static_cast<int32_t>(kept.size());
      kept.push_back(nodes[node]);
      if (kept.back().parent >= 0) kept.back().parent = place[kept.back().parent];
    }
    return kept;
  }
};

// The candidates of every row: target columns, best first, with the draft's log-probabilities.
struct Candidates {
  std::vector<int64_t> columns;
  std::vector<float> log_probabilities;
};

// Nodes that get children: rows for the output head, and what their ranking depends on.
struct Parents {
  std::vector<float> rows;  // [n, hidden]
  std::vector<float> temperatures;
  std::vector<int64_t> keys;

  void clear() { rows.clear(), temperatures.clear(), keys.clear(); }
  void add(const DlTree& tree, const Growing& g, int32_t level, const float* from, int64_t hidden) {
    const float temperature = tree.temperatures == nullptr ? 0.0f : tree.temperatures[g.sequence];
    rows.insert(rows.end(), from, from + hidden);
    temperatures.push_back(temperature);
    keys.push_back(temperature > 0 ? coupled_key(tree.seeds[g.sequence], g.length + level - 1) : 0);
  }
};

// Ranks the candidates of rows that share a rule. noisy: with noise under the rows' keys, else by probability alone.
void rank_rows(const DlTree& tree, Team& team, const Kernels& kernels, int32_t group, const Parents& of, bool noisy,
               int32_t count, int64_t* columns, float* log_probabilities) {
  const auto rows = static_cast<int64_t>(of.keys.size());
  const int64_t n = tree.lm_head->n;
  if (!noisy) {
    std::vector<float> lse(static_cast<size_t>(rows));
    run_topk(*tree.lm_head, team, kernels, group, of.rows.data(), rows, count, columns, log_probabilities, lse.data());
    for (int64_t i = 0; i < rows * count; i++) log_probabilities[i] -= lse[static_cast<size_t>(i / count)];
    return;
  }
  // How far the best is ahead of those that come near says how likely the target is to draw it too.
  const auto looked = static_cast<int32_t>(std::min<int64_t>(std::max(count, kNumContenders), n));
  std::vector<float> weights(static_cast<size_t>(rows * n)), values(static_cast<size_t>(rows * looked));
  std::vector<int64_t> best(static_cast<size_t>(rows * looked));
  run_linear(*tree.lm_head, team, kernels, group, of.rows.data(), rows, weights.data());
  for (int64_t row = 0; row < rows; row++) {
    float* w = weights.data() + row * n;
    const float most = *std::max_element(w, w + n), temperature = of.temperatures[static_cast<size_t>(row)];
    for (int64_t c = 0; c < n; c++) w[c] = (w[c] - most) / temperature;
  }
  run_gumbel_topk(team, weights.data(), tree.target_ids, 0, of.keys.data(), rows, n, looked, best.data(), values.data());
  for (int64_t row = 0; row < rows; row++) {
    const float* of_row = values.data() + row * looked;
    double sum = 0;
    for (int32_t c = 0; c < looked; c++) sum += std::exp(static_cast<double>(of_row[c] - of_row[0]));
    const float total = of_row[0] + static_cast<float>(std::log(sum));
    std::copy_n(best.data() + row * looked, count, columns + row * count);
    for (int32_t c = 0; c < count; c++) {
      log_probabilities[row * count + c] = kSureExponent * (of_row[c] - total) + std::log(kSureFactor);
    }
  }
}

Candidates rank(const DlTree& tree, Team& team, const Kernels& kernels, int32_t group, int64_t hidden,
                const Parents& parents, int32_t count) {
  const size_t rows = parents.keys.size(), width = static_cast<size_t>(count);
  Candidates all{std::vector<int64_t>(rows * width), std::vector<float>(rows * width)};
  for (const bool noisy : {false, true}) {
    Parents some;
    std::vector<size_t> places;
    for (size_t row = 0; row < rows; row++) {
      if ((parents.temperatures[row] > 0) != noisy) continue;
      const float* from = parents.rows.data() + row * static_cast<size_t>(hidden);
      some.rows.insert(some.rows.end(), from, from + hidden);
      some.temperatures.push_back(parents.temperatures[row]);
      some.keys.push_back(parents.keys[row]);
      places.push_back(row);
    }
    if (places.empty()) continue;
    Candidates ranked{std::vector<int64_t>(places.size() * width), std::vector<float>(places.size() * width)};
    rank_rows(tree, team, kernels, group, some, noisy, count, ranked.columns.data(), ranked.log_probabilities.data());
    for (size_t i = 0; i < places.size(); i++) {
      std::copy_n(ranked.columns.data() + i * width, width, all.columns.data() + places[i] * width);
      std::copy_n(ranked.log_probabilities.data() + i * width, width, all.log_probabilities.data() + places[i] * width);
    }
  }
  return all;
}

// All trees that still grow, as one batch. Every level runs the nodes expanded before it once more; only a chain's lie
// in the slots of their tokens, so that its newest row finds them there.
class TreeBatch {
 public:
  // with_features: the model is a draft head; else a decoder, which reads tokens alone.
  TreeBatch(const DlTree& tree, int64_t hidden, bool with_features)
      : tree_(tree), hidden_(hidden), with_features_(with_features), chains_(tree.max_children == 1) {}

  void build(const std::vector<Growing*>& live) {
    tokens_.clear(), positions_.clear(), slots_.clear(), kv_lens_.clear(), pages_.clear(), ancestors_.clear();
    row_indptr_.assign(1, 0), page_indptr_.assign(1, 0), tree_indptr_.assign(1, 0);
    features_.clear();
    for (const Growing* g : live) add(*g);
    const auto values = tokens_.size() * static_cast<size_t>(hidden_);
    normed.resize(values);
    recycled.resize(values);
  }
  DlBatch batch() const {
    return {static_cast<int64_t>(kv_lens_.size()), tree_.page_size,     tokens_.data(), positions_.data(),
            slots_.data(),                         row_indptr_.data(),  kv_lens_.data(), page_indptr_.data(),
            pages_.data(),                         tree_indptr_.data(), ancestors_.data()};
  }
  DlRows rows(bool recycles_normed) {
    return {with_features_ ? features_.data() : nullptr, with_features_ ? 1 : 0, 0, nullptr, normed.data(),
            recycles_normed ? nullptr : recycled.data(), nullptr};
  }
  int64_t first_row(size_t request) const { return row_indptr_[request]; }

  std::vector<float> normed, recycled;  // [rows, hidden]

 private:
  void add(const Growing& g) {
    const int32_t* pages = tree_.page_indices + tree_.page_indptr[g.sequence];
    const auto width = static_cast<size_t>(hidden_);
    std::vector<int32_t> place(g.nodes.size(), -1);  // of each node among the expanded
    const size_t first = chains_ ? g.expanded.size() - 1 : 0;
    for (size_t i = first; i < g.expanded.size(); i++) {
      const Node& node = g.nodes[g.expanded[i]];
      place[g.expanded[i]] = static_cast<int32_t>(i);
      const int64_t index = g.length + static_cast<int64_t>(i);
      tokens_.push_back(node.token);
      positions_.push_back(g.length + node.depth - 1);
      slots_.push_back(pages[index / tree_.page_size] * tree_.page_size + index % tree_.page_size);
      if (with_features_) {
        const size_t above = chains_ || node.parent < 0 ? 0 : static_cast<size_t>(place[node.parent]);
        const float* from =
            node.parent < 0 ? tree_.hidden + g.sequence * hidden_ : g.outputs.data() + above * width;
        features_.insert(features_.end(), from, from + width);
      }
      if (!chains_) {
        const size_t begin = ancestors_.size();
        for (int32_t n = g.expanded[i]; n >= 0; n = g.nodes[n].parent) ancestors_.push_back(place[n]);
        std::reverse(ancestors_.begin() + static_cast<std::ptrdiff_t>(begin), ancestors_.end());
      }
      tree_indptr_.push_back(static_cast<int32_t>(ancestors_.size()));
    }
    const int64_t keys = g.length + static_cast<int64_t>(g.expanded.size());
    const int64_t num_pages = (keys + tree_.page_size - 1) / tree_.page_size;
    kv_lens_.push_back(static_cast<int32_t>(keys));
    pages_.insert(pages_.end(), pages, pages + num_pages);
    page_indptr_.push_back(static_cast<int32_t>(pages_.size()));
    row_indptr_.push_back(static_cast<int32_t>(tokens_.size()));
  }

  const DlTree& tree_;
  const int64_t hidden_;
  const bool with_features_, chains_;
  std::vector<int64_t> tokens_, positions_, slots_;
  std::vector<int32_t> kv_lens_, row_indptr_, page_indptr_, pages_, tree_indptr_, ancestors_;
  std::vector<float> features_;
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

void DlModel::check_tree(const DlTree& tree) const {
  require(!draft_input_ || tree.hidden != nullptr, "hidden: a draft head begins with it");
  require(tree.temperatures == nullptr || tree.seeds != nullptr, "seeds: temperatures come without them");
  require(tree.page_size >= 1, "page_size: " + number(tree.page_size) + " is not positive");
  require(tree.max_depth >= 1 && tree.max_children >= 1 && tree.max_children <= 64,
          "max_depth, max_children: " + number(tree.max_depth) + ", " + number(tree.max_children) +
              " are not positive, or more than 64 children");
  require(tree.least_value <= 0, "least_value: a log-probability is not above 0");
  check_output(*tree.lm_head, tree.target_ids);
  for (int64_t d = 0; d < tree.num_sequences; d++) {
    const std::string sequence = " of sequence " + number(d);
    require(tree.budgets[d] >= 0 && tree.budgets[d] <= tree.max_nodes,
            "budgets: " + number(tree.budgets[d]) + sequence + " is not in 0.." + number(tree.max_nodes));
    require(tree.lengths[d] >= 1, "lengths: " + number(tree.lengths[d]) + sequence + " leaves no root");
    const int64_t pages = int64_t{tree.page_indptr[d + 1]} - tree.page_indptr[d];
    const int32_t expanded = width_of(tree, tree.budgets[d]) * std::max(0, levels_of(tree, tree.budgets[d]) - 1);
    const int64_t last = int64_t{tree.lengths[d]} + expanded;
    require(pages * tree.page_size >= last,
            "page_indptr: " + number(pages) + " pages" + sequence + " do not hold " + number(last) + " keys");
    require(last <= desc_.num_positions,
            "lengths: " + number(tree.lengths[d]) + sequence + " and its drafts pass " + number(desc_.num_positions - 1));
  }
}

void DlModel::run_tree(Team& team, const DlPool& pool, const DlTree& tree, const DlTreeOut& out) {
  check_tree(tree);
  const int64_t hidden = desc_.hidden;
  const bool recycles_normed = !draft_input_ || draft_input_->recycles_normed != 0;
  std::vector<Growing> all;
  std::vector<Growing*> live;
  int32_t most = 0;
  for (int32_t d = 0; d < tree.num_sequences; d++) {
    const int32_t budget = tree.budgets[d];
    all.push_back({d, tree.lengths[d], budget, levels_of(tree, budget), width_of(tree, budget), {}, {}, 0, {}});
    most = std::max(most, budget);
  }
  for (Growing& g : all) {
    if (g.budget > 0) live.push_back(&g);
  }
  const int32_t children = static_cast<int32_t>(
      std::min<int64_t>({tree.max_children, most, tree.lm_head->n}));
  TreeBatch batch(tree, hidden, draft_input_.has_value());
  Parents parents;
  for (const Growing* g : live) parents.add(tree, *g, 1, tree.normed + g->sequence * hidden, hidden);
  for (int32_t level = 1; !live.empty(); level++) {
    const Candidates found = rank(tree, team, kernels_, desc_.activation_group, hidden, parents, children);
    size_t row = 0;
    std::vector<Growing*> next;
    for (Growing* g : live) {
      const size_t first = g->nodes.size();
      const size_t beam = level == 1 ? 1 : g->beam;
      for (size_t i = 0; i < beam; i++, row++) {
        const int32_t parent = level == 1 ? -1 : g->expanded[g->expanded.size() - beam + i];
        const double above = parent < 0 ? 0.0 : g->nodes[parent].value;
        for (int32_t c = 0; c < children; c++) {
          const size_t at = row * children + c;
          const int64_t column = found.columns[at];
          const int64_t token = tree.target_ids == nullptr ? column : tree.target_ids[column];
          const double value = above + static_cast<double>(found.log_probabilities[at]);
          if (value >= tree.least_value) g->nodes.push_back({token, parent, level, value});
        }
      }
      if (level >= g->levels) continue;
      g->choose_beam(first);
      if (g->beam > 0) next.push_back(g);
    }
    live = next;
    if (live.empty()) break;
    batch.build(live);
    const DlBatch pass = batch.batch();
    forward(team, pool, pass, batch.rows(recycles_normed));
    parents.clear();
    const std::vector<float>& outputs = recycles_normed ? batch.normed : batch.recycled;
    for (size_t r = 0; r < live.size(); r++) {
      Growing* g = live[r];
      const int64_t begin = batch.first_row(r) * hidden, end = batch.first_row(r + 1) * hidden;
      g->outputs.assign(outputs.begin() + begin, outputs.begin() + end);
      for (auto b = static_cast<int64_t>(g->beam); b > 0; b--) {
        parents.add(tree, *g, level + 1, batch.normed.data() + end - b * hidden, hidden);
      }
    }
  }
  for (const Growing& g : all) {
    const std::vector<Node> kept = g.best();
    out.counts[g.sequence] = static_cast<int32_t>(kept.size());
    for (size_t i = 0; i < kept.size(); i++) {
      const int64_t at = g.sequence * tree.max_nodes + static_cast<int64_t>(i);
      out.tokens[at] = kept[i].token;
      out.parents[at] = kept[i].parent;
      out.values[at] = kept[i].value;
    }
  }
}
