// Row kernels: norm, activation quantisation, SiLU, rotary embedding. Included in an instruction set's namespace.

static void will_read(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) prefetch(static_cast<const uint8_t*>(p) + i);
}

static void will_write(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) prefetch_write(static_cast<const uint8_t*>(p) + i);
}

// 2^x for x <= 127: polynomial on [-1/2, 1/2], relative error about 2e-7.
inline F exp2_lanes(F x) {
  x = fmax(x, fset(-127.0f));
  const F n = fround(x);
  const F r = fsub(x, n);
  F p = fset(1.5403530393e-4f);
  p = fma(p, r, fset(1.3333558146e-3f));
  p = fma(p, r, fset(9.6181291076e-3f));
  p = fma(p, r, fset(5.5504108665e-2f));
  p = fma(p, r, fset(2.4022650696e-1f));
  p = fma(p, r, fset(6.9314718056e-1f));
  p = fma(p, r, fset(1.0f));
  return fscale2(p, n);
}

constexpr float kLog2E = 1.44269504088896341f;

inline float exp2_scalar(float x) {
  float lanes[16];
  fstore(lanes, exp2_lanes(fset(x)));
  return lanes[0];
}

inline float inverse_rms(const float* x, int64_t n, float eps) {
  F acc = fzero();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const F v = fload(x + i);
    acc = fma(v, v, acc);
  }
  if (i < n) {
    const F v = fload_n(x + i, n - i);
    acc = fma(v, v, acc);
  }
  return 1.0f / __builtin_sqrtf(fsum(acc) / static_cast<float>(n) + eps);
}

static void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* y) {
  const F scale = fset(inverse_rms(x, n, eps));
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) fstore(y + i, fmul(fmul(fload(x + i), scale), fload(weight + i)));
  if (i < n) fstore_n(y + i, fmul(fmul(fload_n(x + i, n - i), scale), fload_n(weight + i, n - i)), n - i);
}

inline F load_padded(const float* x, int64_t i, int64_t n) {
  if (i + 16 <= n) return fload(x + i);
  return i < n ? fload_n(x + i, n - i) : fzero();
}

static void quantise(const float* x, int64_t k0, int64_t n, const Activations& to, int64_t row) {
  const int64_t padded = (n + 63) / 64 * 64;
  if (to.as_pairs) {
    auto* pairs = reinterpret_cast<Pair*>(to.pairs) + (row * to.kp + k0) / 2;
    for (int64_t i = 0; i < padded; i += 16) store_pairs(pairs + i / 2, load_padded(x, i, n));
    return;
  }
  int8_t* q = to.q + row * to.kp + k0;
  const int64_t first = (row * to.kp + k0) / 32;
  const int64_t vectors = to.group / 16;
  for (int64_t g = 0; g < padded; g += to.group) {
    F v[4];
    F peak = fzero();
    for (int64_t j = 0; j < vectors; j++) {
      v[j] = load_padded(x, g + 16 * j, n);
      peak = fmax(peak, fabs(v[j]));
    }
    const float largest_value = flargest(peak);
    const float scale = largest_value / 127.0f;
    const F inverse = fset(largest_value > 0.0f ? 127.0f / largest_value : 0.0f);
    for (int64_t j = 0; j < vectors; j += 2) {
      const I a = to_int(fmin(fmax(fmul(v[j], inverse), fset(-127.0f)), fset(127.0f)));
      const I b = to_int(fmin(fmax(fmul(v[j + 1], inverse), fset(-127.0f)), fset(127.0f)));
      istore8(q + g + 16 * j, a);
      istore8(q + g + 16 * j + 16, b);
      const int32_t sum = isum(iadd(a, b));
      const int64_t half = first + (g + 16 * j) / 32;
      to.scales[half] = scale;
      to.sums[half] = scale * static_cast<float>(sum);
      to.offsets[half] = -128 * sum;
    }
  }
}

inline F silu(F gate, F up) {
  // The argument is clamped where the result is 0 or `gate` to the last bit anyway.
  const F negative = fmin(fmul(gate, fset(-kLog2E)), fset(126.0f));
  return fmul(fdiv(gate, fadd(fset(1.0f), exp2_lanes(negative))), up);
}

static void silu_mul(const float* gate, const float* up, int64_t n, float* y) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) fstore(y + i, silu(fload(gate + i), fload(up + i)));
  if (i < n) fstore_n(y + i, silu(fload_n(gate + i, n - i), fload_n(up + i, n - i)), n - i);
}

// Half-split rotation: element i of the first half pairs with element i of the second.
static void rotate_key(const float* x, const RotaryHead& head, float* y) {
  const int64_t d = head.head_dim, half = head.rotary_dim / 2;
  if (head.norm != nullptr) {
    rms_norm(x, head.norm, head.eps, d, y);
  } else {
    for (int64_t i = 0; i < d; i++) y[i] = x[i];
  }
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t n = half - i < 16 ? half - i : 16;
    const F a = fload_n(y + i, n), b = fload_n(y + half + i, n);
    const F c = fload_n(head.cos + i, n), s = fload_n(head.sin + i, n);
    fstore_n(y + i, fsub(fmul(a, c), fmul(b, s)), n);
    fstore_n(y + half + i, fma(a, s, fmul(b, c)), n);
  }
}

static void rotate_query(const float* x, const RotaryHead& head, float scale, uint8_t* pairs) {
  float y[kMaxHeadDim];
  rotate_key(x, head, y);
  const int64_t d = head.head_dim;
  Pair buffer[8];
  auto* to = reinterpret_cast<Pair*>(pairs);
  for (int64_t i = 0; i < d; i += 16) {
    const int64_t n = d - i < 16 ? d - i : 16;
    store_pairs(buffer, fmul(fload_n(y + i, n), fset(scale)));
    __builtin_memcpy(to + i / 2, buffer, static_cast<size_t>(n / 2) * sizeof(Pair));
  }
}

static void largest(const float* x, int64_t n, float* value, int64_t* index) {
  F peak = fset(-__builtin_inff());
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) peak = fmax(peak, fload(x + i));
  if (i < n) peak = fmax(peak, fkeep_n(fload_n(x + i, n - i), n - i, -__builtin_inff()));
  *value = flargest(peak);
  *index = 0;
  for (int64_t j = 0; j < n; j++) {
    if (x[j] == *value) {
      *index = j;
      return;
    }
  }
}

static float exp_sum(const float* x, int64_t n, float maximum) {
  F acc = fzero();
  const F shift = fset(maximum);
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t count = n - i < 16 ? n - i : 16;
    const F e = exp2_lanes(fmul(fsub(fload_n(x + i, count), shift), fset(kLog2E)));
    acc = fadd(acc, fkeep_n(e, count, 0.0f));
  }
  return fsum(acc);
}

static void merge_exp_sum(float* maximum, float* total, float other_maximum, float other_total) {
  const float peak = *maximum > other_maximum ? *maximum : other_maximum;
  *total = *total * exp2_scalar((*maximum - peak) * kLog2E) + other_total * exp2_scalar((other_maximum - peak) * kLog2E);
  *maximum = peak;
}
