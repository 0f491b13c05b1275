// Products with AMX and without:
//
// multiply_keys: TILE rows of int8 digits with a block's keys, less the bias.
// multiply_bf16: sum over j of TILE rows of bf16, so far apart, with a block's keys in bf16.
// multiply_values: sum = sum * shrink + weights times levels, for TILE rows and 64 channels.
#pragma once
#include "task.h"
#ifdef AMX
#include "products_amx.h"
#else
#include "products_avx512.h"
#endif
