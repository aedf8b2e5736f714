// Packed linears: M rows against one block of 16 columns. Included in an instruction set's namespace.

constexpr int64_t kNearBytes = 4096, kFarBytes = 8192;  // how far ahead of their use weights are asked for

template <int M>
struct Rows {
  const int8_t* q[M];
  const float* scales[M];
  const float* sums[M];
  const int32_t* offsets[M];
  const Pair* pairs[M];
  Background* background;  // null when there is nothing to fetch

  Rows(const Activations& x, int64_t row0) {
    background = x.background != nullptr && x.background->piece != x.background->end ? x.background : nullptr;
    for (int r = 0; r < M; r++) {
      const int64_t at = (row0 + r) * x.kp;
      q[r] = x.q + at;
      scales[r] = x.scales + at / 32;
      sums[r] = x.sums + at / 32;
      offsets[r] = x.offsets + at / 32;
      pairs[r] = reinterpret_cast<const Pair*>(x.pairs) + at / 2;
    }
  }
};

// Few rows wait for memory alone, and take what comes into the first cache at once; with more rows the activations
// need that cache.
template <int M>
inline void prefetch_range(const uint8_t* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) {
    if constexpr (M <= 2) {
      prefetch(p + i + kNearBytes);
    } else {
      prefetch_far(p + i + kFarBytes);
    }
  }
}

// One step of what this thread reads after its products. One or two rows leave no time for it: they wait for memory.
template <int M>
inline void fetch_background(const Rows<M>& x) {
  if constexpr (M > 2) {
    Background* b = x.background;
    if (b == nullptr || b->piece == b->end) return;
    const uint8_t* p = *b->piece + b->offset + b->done;
    for (int64_t i = 0; i < b->lines_per_step; i++) prefetch_far(p + i * 64);
    b->done += b->lines_per_step * 64;
    if (b->done >= b->piece_bytes) {
      b->done = 0;
      b->piece++;
    }
  }
}

struct TileQ4_0 {
  template <int M>
  static void run(const uint8_t* w, int64_t slabs, const Rows<M>& x, F* acc) {
    for (int64_t s = 0; s < slabs; s++, w += slab_bytes(DL_Q4_0)) {
      prefetch_range<M>(w, slab_bytes(DL_Q4_0));
      fetch_background(x);
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const F d = fload_f16(w + h * 32);
        I sum[M];
        nibble_dots<M>(w + 64 + h * 256, x.q, s * 64 + h * 32, sum);
        for (int r = 0; r < M; r++) {
          // offsets are -128 times the sum; the nibbles stand 8 above their value
          const I dots = iadd(sum[r], iset(x.offsets[r][2 * s + h] / 16));
          acc[r] = fma(to_float(dots), fmul(d, fset(x.scales[r][2 * s + h])), acc[r]);
        }
      }
    }
  }
};

struct TileQ4_1 {
  template <int M>
  static void run(const uint8_t* w, int64_t slabs, const Rows<M>& x, F* acc) {
    for (int64_t s = 0; s < slabs; s++, w += slab_bytes(DL_Q4_1)) {
      prefetch_range<M>(w, slab_bytes(DL_Q4_1));
      fetch_background(x);
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const F d = fload_f16(w + h * 32), m = fload_f16(w + 64 + h * 32);
        I sum[M];
        nibble_dots<M>(w + 128 + h * 256, x.q, s * 64 + h * 32, sum);
        for (int r = 0; r < M; r++) {
          acc[r] = fma(to_float(sum[r]), fmul(d, fset(x.scales[r][2 * s + h])), acc[r]);
          acc[r] = fma(m, fset(x.sums[r][2 * s + h]), acc[r]);
        }
      }
    }
  }
};

struct TileQ8_0 {
  template <int M>
  static void run(const uint8_t* w, int64_t slabs, const Rows<M>& x, F* acc) {
    for (int64_t s = 0; s < slabs; s++, w += slab_bytes(DL_Q8_0)) {
      prefetch_range<M>(w, slab_bytes(DL_Q8_0));
      fetch_background(x);
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const F d = fload_f16(w + h * 32);
        I sum[M];
        for (int r = 0; r < M; r++) sum[r] = start8(x.offsets[r][2 * s + h]);
        byte_dots<M, 8>(w + 64 + h * 512, x.q, s * 64 + h * 32, sum);
        for (int r = 0; r < M; r++) {
          acc[r] = fma(to_float(sum[r]), fmul(d, fset(x.scales[r][2 * s + h])), acc[r]);
        }
      }
    }
  }
};

// Needs activations in groups of 64: one scale per slab.
struct TileW8 {
  template <int M>
  static void run(const uint8_t* w, int64_t slabs, const Rows<M>& x, F* acc) {
    for (int64_t s = 0; s < slabs; s++, w += slab_bytes(DL_W8)) {
      prefetch_range<M>(w, slab_bytes(DL_W8));
      fetch_background(x);
      I sum[M];
      for (int r = 0; r < M; r++) sum[r] = start8(x.offsets[r][2 * s] + x.offsets[r][2 * s + 1]);
      byte_dots<M, 16>(w, x.q, s * 64, sum);
      for (int r = 0; r < M; r++) acc[r] = fma(to_float(sum[r]), fset(x.scales[r][2 * s]), acc[r]);
    }
  }
};

struct TileBF16 {
  template <int M>
  static void run(const uint8_t* w, int64_t slabs, const Rows<M>& x, F* acc) {
    for (int64_t s = 0; s < slabs; s++, w += slab_bytes(DL_BF16)) {
      prefetch_range<M>(w, slab_bytes(DL_BF16));
      fetch_background(x);
#pragma GCC unroll 8
      for (int i = 0; i < 32; i++) {
        const I v = iload(w + i * 64);
        for (int r = 0; r < M; r++) acc[r] = dot_pair(acc[r], v, x.pairs[r] + s * 32 + i);
      }
    }
  }
};

struct LinearCall {
  const WeightView& view;
  int64_t block0, block1;
  const Activations& x;
  const float* add;  // or null
  float* out;
  int64_t stride;
};

template <class Tile, int M>
static void linear_tile(const LinearCall& call, int64_t block, int64_t row, int64_t offset) {
  const WeightView& view = call.view;
  const Rows<M> rows(call.x, row);
  F acc[M];
  for (int r = 0; r < M; r++) {
    acc[r] = fzero();
    prefetch_write(call.out + offset + r * call.stride);
  }
  Tile::template run<M>(view.data + block * view.block_bytes, view.slabs, rows, acc);
  const int64_t columns = view.n - block * 16 < 16 ? view.n - block * 16 : 16;
  for (int r = 0; r < M; r++) {
    F y = acc[r];
    if (view.column_scales != nullptr) y = fmul(y, fload(view.column_scales + block * 16));
    if (view.bias != nullptr) y = fadd(y, fload(view.bias + block * 16));
    const int64_t at = offset + r * call.stride;
    if (columns == 16) {
      if (call.add != nullptr) y = fadd(y, fload(call.add + at));
      fstore(call.out + at, y);
    } else {
      if (call.add != nullptr) y = fadd(y, fload_n(call.add + at, columns));
      fstore_n(call.out + at, y, columns);
    }
  }
}

using TileFunction = void (*)(const LinearCall&, int64_t, int64_t, int64_t);

template <class Tile, int M>
constexpr void fill_tiles(TileFunction* table) {
  table[M] = linear_tile<Tile, M>;
  if constexpr (M > 1) fill_tiles<Tile, M - 1>(table);
}

struct TileTables {
  TileFunction of[5][kTileRows + 1] = {};
  constexpr TileTables() {
    fill_tiles<TileW8, kTileRows>(of[DL_W8]);
    fill_tiles<TileQ4_0, kTileRows>(of[DL_Q4_0]);
    fill_tiles<TileQ4_1, kTileRows>(of[DL_Q4_1]);
    fill_tiles<TileQ8_0, kTileRows>(of[DL_Q8_0]);
    fill_tiles<TileBF16, kTileRows>(of[DL_BF16]);
  }
};

// Known when compiling: code that runs at load time must not use instructions the processor may lack.
static constexpr TileTables tile_tables;

static void linear(const WeightView& view, int64_t block0, int64_t block1, const Activations& x, int64_t row0,
                   int64_t rows, const float* add, float* out, int64_t stride) {
  const LinearCall call{view, block0, block1, x, add, out, stride};
  const TileFunction* table = tile_tables.of[view.format];
  // Tiles as even as can be: 16 rows go as 8 and 8, not as 12 and 4.
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t block = block0; block < block1; block++) {
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t begin = rows * t / tiles, end = rows * (t + 1) / tiles;
      table[end - begin](call, block, row0 + begin, begin * stride + (block - block0) * 16);
    }
  }
}
