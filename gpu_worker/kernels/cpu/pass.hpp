// The forward pass as each thread of the team walks it; all threads walk the same phases and share their items.
#pragma once
#include "linear_work.hpp"
#include "model.hpp"

class DlModel::Pass {
 public:
  Pass(DlModel& model, dl::Worker& worker, const DlPool& pool, int threads, float* hidden_out);
  void run();

 private:
  void attend(int64_t layer, const dl::Activations& to);
  void rotate(int64_t layer, int64_t row, int64_t kv_head) const;
  void gate_up(const DlLayer& layer, const dl::Activations& x, const dl::Activations& to, int64_t item) const;
  void norm(const float* residual, const float* weight, int64_t row, const dl::Activations& to) const;
  // A phase of n items fn(item, input), whose input is the normed residual; then last().
  template <class Fn, class Last>
  void normed_phase(const float* residual, const float* weight, int32_t format, int64_t n, Fn&& fn, Last&& last);
  // Brings shared activations of few rows near: a good part of them lies in another core's cache.
  void will_read(const dl::Activations& x) const;
  void will_write(const dl::Activations& to, int64_t row, int64_t k0, int64_t n) const;

  DlModel& model_;
  dl::Worker& worker_;
  const DlPool& pool_;
  const int threads_;
  float* hidden_out_;
  const DlModelDesc& desc_;
  const dl::Kernels& kernels_;
  const dl::AttentionPlan& plan_;
  dl::Workspace& workspace_;
  const int64_t rows_, hidden_, q_width_, qkv_width_;
  const int32_t group_;
};
