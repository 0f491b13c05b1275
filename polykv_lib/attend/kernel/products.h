// Steps with AMX and without:
//
// multiply_keys: products of TILE digit rows with a block's keys, less the bias.
// multiply_packed: products of TILE rows, of so many terms, with a block's packed keys.
// multiply_waves: the same of up to TILE rows with waves.
// multiply_values: sum = sum * shrink + weights times levels, for TILE rows and 64 channels.
#pragma once
#include "task.h"
#ifdef AMX
#include "products_amx.h"
#else
#include "products_avx512.h"
#endif
