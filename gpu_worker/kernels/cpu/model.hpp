// A llama-family decoder, or a draft head of such layers, bound to one instruction set.
#pragma once
#include <optional>
#include <vector>

#include "attention_plan.hpp"
#include "draftline_cpu.h"
#include "isa.hpp"
#include "team.hpp"
#include "workspace.hpp"

struct DlModel {
  // draft_input may be null.
  DlModel(const DlModelDesc& desc, const DlDraftInput* draft_input, const dl::Kernels& kernels);
  void forward(dl::Team& team, const DlPool& pool, const DlBatch& batch, const DlRows& rows);
  // See DlTree. Nothing has run when it throws.
  void run_tree(dl::Team& team, const DlPool& pool, const DlTree& tree, const DlTreeOut& out);

 private:
  // One thread's way through the layers.
  class Pass;

  void check_layers() const;
  void check_draft_input() const;
  void check(const DlPool& pool, const DlBatch& batch, const DlRows& rows) const;
  void check_tree(const DlTree& tree) const;
  // An output head for this model, and the ids that its columns stand for (null: their own numbers).
  void check_output(const DlLinear& lm_head, const int64_t* target_ids) const;
  // Layer 0's qkv reads the draft head's pair of embedding and features.
  bool pairs_enter_qkv() const { return draft_input_.has_value() && draft_input_->combine == nullptr; }
  void embed(int64_t row, float* to) const;

  const DlModelDesc desc_;
  const std::vector<DlLayer> layers_;
  const std::optional<DlDraftInput> draft_input_;
  const dl::Kernels& kernels_;

  // Of the pass that runs.
  const DlBatch* batch_ = nullptr;
  dl::AttentionPlan plan_;
  dl::Workspace workspace_;
};
