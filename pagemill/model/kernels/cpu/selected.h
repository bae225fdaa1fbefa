// The kernels of the chosen instruction set, for the units that export functions.
#pragma once

#include "kernels.h"

extern const KernelTable* selected;
