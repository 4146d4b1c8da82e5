// The tile registers of Intel AMX as eight numbered 16 x 64-byte tiles: the instructions where the compiler was told to use them,
// or (BATON_EMULATE_AMX) plain C++ that does what the manual says they do, so that the code above it runs under tests anywhere.
//
// Tile numbers must be literals. A thread calls amx_begin before its first tile and amx_end after its last.
#pragma once

#include "simd.h"

#if defined(__AMX_BF16__) || defined(BATON_EMULATE_AMX)
#define BATON_AMX 1
#else
#define BATON_AMX 0
#endif

#if defined(__AMX_BF16__)

#include <sys/syscall.h>
#include <unistd.h>

namespace baton {

// Linux gives a process the tile state only when it asks. False: it does not.
inline bool amx_allowed() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

inline void amx_begin() {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  _tile_loadconfig(&config);
}
inline void amx_end() { _tile_release(); }

}  // namespace baton

#define AMX_ZERO(tile) _tile_zero(tile)
#define AMX_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define AMX_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define AMX_DOT(sums, a, b) _tile_dpbf16ps(sums, a, b)

#elif BATON_AMX

namespace baton {

struct EmulatedTile {
  uint8_t rows[16][64];
};
inline EmulatedTile* emulated_tiles() {
  static thread_local EmulatedTile tiles[8];
  return tiles;
}
inline bool amx_allowed() { return true; }
inline void amx_begin() { std::memset(emulated_tiles(), 0xff, 8 * sizeof(EmulatedTile)); }  // NaN: nothing may rely on old contents
inline void amx_end() { amx_begin(); }
inline void emulated_zero(int tile) { std::memset(&emulated_tiles()[tile], 0, sizeof(EmulatedTile)); }
inline void emulated_load(int tile, const void* from, int64_t stride) {
  for (int row = 0; row < 16; ++row) std::memcpy(emulated_tiles()[tile].rows[row], static_cast<const char*>(from) + row * stride, 64);
}
inline void emulated_store(int tile, void* to, int64_t stride) {
  for (int row = 0; row < 16; ++row) std::memcpy(static_cast<char*>(to) + row * stride, emulated_tiles()[tile].rows[row], 64);
}
// TDPBF16PS: pairs in order, two fused steps each; denormals count as zero, which no value in our tests comes near.
inline void emulated_dot(int sums, int a, int b) {
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      float sum;
      std::memcpy(&sum, &emulated_tiles()[sums].rows[m][4 * n], 4);
      for (int pair = 0; pair < 16; ++pair) {
        bf16 left[2], right[2];
        std::memcpy(left, &emulated_tiles()[a].rows[m][4 * pair], 4);
        std::memcpy(right, &emulated_tiles()[b].rows[pair][4 * n], 4);
        sum = std::fma(widen(left[0]), widen(right[0]), sum);
        sum = std::fma(widen(left[1]), widen(right[1]), sum);
      }
      std::memcpy(&emulated_tiles()[sums].rows[m][4 * n], &sum, 4);
    }
}

}  // namespace baton

#define AMX_ZERO(tile) emulated_zero(tile)
#define AMX_LOAD(tile, from, stride) emulated_load(tile, from, stride)
#define AMX_STORE(tile, to, stride) emulated_store(tile, to, stride)
#define AMX_DOT(sums, a, b) emulated_dot(sums, a, b)

#endif
