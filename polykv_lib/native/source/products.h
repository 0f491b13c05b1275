// Products with AMX and without, of the first n of TILE rows; what is behind them may be anything:
//
// multiply_keys: rows of int8 digits with a block's keys, less the bias; in 1 / 256 of a row's unit.
// multiply_bf16: sum over terms of rows of bf16, so far apart, with a block's keys in bf16.
// multiply_values: sum = sum * shrink + weights times levels, for 64 channels.
#pragma once
#include "task.h"
#ifdef AMX
#include "products_amx.h"
#else
#include "products_avx512.h"
#endif
