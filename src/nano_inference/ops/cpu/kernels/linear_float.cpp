#include "linear_tiles.h"

namespace nano {

void linear(const Linear<float>& job, int64_t row, int64_t end_row, int64_t panel, int64_t end_panel, Panels<float> next) {
  if (job.w.codes) return quantised_linear(job, row, end_row, panel, end_panel);
  walk(job, row, end_row, panel, end_panel, next);
}

}  // namespace nano
