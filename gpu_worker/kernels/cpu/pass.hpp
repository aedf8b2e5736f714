// The forward pass as each thread of the team walks it; all threads walk the same phases and share their items.
#pragma once
#include "linear_work.hpp"
#include "model.hpp"

class DlModel::Pass {
 public:
  Pass(DlModel& model, dl::Worker& worker, const DlPool& pool, int threads, const DlRows& data);
  void run();

 private:
  // Rows that each thread prepares for itself: cheaper than to share the work, wait for each other and fetch the results.
  static constexpr int64_t kOwnRows = 8;

  // The residual stream that enters the layers (pass_input.cpp).
  const float* make_input();
  // A draft head's: the features as they meet the embedding, then what becomes of both.
  const float* fuse_features();
  const float* make_draft_input();
  // Quantises the normed embedding and the normed features of a row side by side.
  void pair(int64_t row, const dl::Activations& to) const;
  // Lets the products that follow fetch the keys and values of a layer.
  void fetch_ahead(int64_t layer);
  dl::Activations fetching(dl::Activations x);
  void attend(int64_t layer, const dl::Activations& to);
  void rotate(int64_t layer, int64_t row, int64_t kv_head) const;
  void gate_up(const DlLayer& layer, const dl::Activations& x, const dl::Activations& to, int64_t item) const;
  void norm(const float* residual, const float* weight, int64_t row, const dl::Activations& to) const;
  // Copies the columns and rows of an item of a layer's down projection, if its output is wanted.
  void capture(int64_t layer, const dl::LinearWork& work, int64_t item, const float* residual) const;
  void put_out(int64_t row, const float* residual) const;
  // A phase of n items fn(item, input), whose input is what prepare(row, to) quantises for `linear`; then last().
  template <class Prepare, class Fn, class Last>
  void product_phase(const DlLinear& linear, int64_t n, Prepare&& prepare, Fn&& fn, Last&& last);
  // Brings shared activations of few rows near: a good part of them lies in another core's cache.
  void will_read(const dl::Activations& x) const;
  void will_write(const dl::Activations& to, int64_t row, int64_t k0, int64_t n) const;

  DlModel& model_;
  dl::Worker& worker_;
  const DlPool& pool_;
  const int threads_;
  const DlRows& data_;
  const DlModelDesc& desc_;
  const dl::Kernels& kernels_;
  const dl::AttentionPlan& plan_;
  dl::Workspace& workspace_;
  const int64_t rows_, hidden_, q_width_, qkv_width_;
  const int32_t group_;
  dl::Background background_{};
  const float* features_ = nullptr;  // of a draft head, as they meet the embedding: [rows, hidden]
};

template <class Prepare, class Fn, class Last>
void DlModel::Pass::product_phase(const DlLinear& linear, int64_t n, Prepare&& prepare, Fn&& fn, Last&& last) {
  if (rows_ <= kOwnRows) {
    const dl::Activations own =
        fetching(workspace_.own_input.at(worker_.thread(), linear.k, linear.format, group_));
    bool made = false;
    worker_.phase(
        n,
        [&](int64_t item) {
          for (int64_t row = 0; !made && row < rows_; row++) prepare(row, own);
          made = true;
          fn(item, own);
        },
        last);
    return;
  }
  const dl::Activations shared =
      fetching(workspace_.shared_input.at(0, linear.k, linear.format, group_));
  worker_.phase(rows_, [&](int64_t row) { prepare(row, shared); });
  will_read(shared);
  worker_.phase(n, [&](int64_t item) { fn(item, shared); }, last);
}
