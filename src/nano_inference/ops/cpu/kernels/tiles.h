// The law of tiles: the order in which AMX adds up products of bfloat16, reproduced on every machine. Builds with
// NANO_TILES follow it. Other builds follow the law of pairs (`vdot`).
//
// A sum proceeds in chunks of up to 16 pairs, counted from its start. Within a chunk, the products of the pairs' first
// numbers are added up in rising order from zero, each by one fma, and the products of the second numbers likewise.
// Then the result is sum + (firsts + seconds). tdpbf16ps computes exactly this (Intel's manual, vol. 2), and flushes
// denormals as all kernels do.
#pragma once
#include "simd.h"

namespace nano {

constexpr int64_t CHUNK = 16;  // pairs

inline Vec firsts_of(IVec pairs) { return vbits(ishl<16>(pairs)); }
inline Vec seconds_of(IVec pairs) { return vbits(iand(pairs, iset(0xffff0000))); }

#if defined(NANO_AMX)
// AMX instructions. A tile is identified by its number, 0 to 7. The intrinsics do not declare that they read memory.
#define TILE_LOAD(tile, from, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"(int64_t(stride)) : "memory")
#define TILE_STORE(tile, to, stride) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"(int64_t(stride)) : "memory")
#define TILE_ZERO(tile) asm volatile("tilezero %tmm" #tile)
#define TILE_PAIRS(sums, a, b) asm volatile("tdpbf16ps %tmm" #b ", %tmm" #a ", %tmm" #sums)
#define TILE_CODES(sums, a, b) asm volatile("tdpbssd %tmm" #b ", %tmm" #a ", %tmm" #sums)

// Rows, and bytes per row, of each tile in this thread during an object's lifetime. For sums a[i] * b[j], the tile of a
// has a row for each i, and the tile of b a row for each four bytes of a's rows.
class TileShapes {
 public:
  void set(int tile, int64_t rows, int64_t bytes) { at_.rows[tile] = uint8_t(rows), at_.bytes[tile] = uint16_t(bytes); }
  void load() {
    asm volatile("ldtilecfg %0" : : "m"(at_) : "memory");
    loaded_ = true;
  }
  ~TileShapes() {
    if (loaded_) asm volatile("tilerelease");
  }

 private:
  bool loaded_ = false;
  struct {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } at_;
};
#endif

}  // namespace nano
