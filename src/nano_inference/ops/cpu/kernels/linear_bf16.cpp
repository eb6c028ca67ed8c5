#if defined(NANO_TILES)
#include "linear_chunks.h"
#else
#include "linear_tiles.h"
#endif

namespace nano {

void linear(const Linear<bf16>& job, int64_t row, int64_t end_row, int64_t panel, int64_t end_panel, Panels<bf16> next) {
  if (job.w.codes) return quantised_linear(job, row, end_row, panel, end_panel);
#if defined(NANO_TILES)
  walk_chunks(job, row, end_row, panel, end_panel, next);
#else
  walk(job, row, end_row, panel, end_panel, next);
#endif
}

}  // namespace nano
