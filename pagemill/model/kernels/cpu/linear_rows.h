// Rows of a packed weight, for whoever embeds tokens. Rows are bfloat16.
#pragma once

#include "kernels.h"

// Row `index` of a weight without a gate, which must have one.
void row_of_weight(const PmLinear& linear, int64_t index, void* row);
// Each element times `scale`, rounded.
void scale_row(void* row, int64_t cols, float scale);
