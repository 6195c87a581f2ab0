// What a decode step of up to 8 rows computes between two attentions of a dense model, in one launch: the product that
// ends the first, norm, gate and up, down, norm, and the product that begins the second.
//
// Each program is a block of threads that takes a multiprocessor for itself, and there are no more of them than
// multiprocessors, so that all run at the same time, once other kernels have ended, and can wait for each other. A
// product's rows of weights are divided among them in tiles of TILE rows. LOADERS warps of a program copy weights into a
// ring of slots in shared memory, in the order in which they are needed, and wait for no result. WARPS warps multiply.
// So while all programs wait for the last result of a product, the weights of the next ones arrive, and the memory never
// idles for long.
//
// Compiled by NVRTC with HIDDEN (numbers of a row between layers) and STAGES (slots of the ring). Numbers are bfloat16,
// sums float32.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

constexpr int ROWS = 8;
constexpr int TILE = 16;                      // rows of weights in a slot
constexpr int DEPTH = 512;                    // numbers of each of them
constexpr int LOADERS = 4;
constexpr int MINE = TILE / LOADERS;          // rows of a loader
constexpr int WARPS = 8;                      // each multiplies DEPTH / WARPS numbers of all rows of a slot
constexpr int HALVES = DEPTH / WARPS / 32;
constexpr int AHEAD = 6;                      // slots for which activations are asked for ahead, an even number
constexpr int UNDER_WAY = 4;                  // slots that are asked for at the same time
static_assert(STAGES > UNDER_WAY, "a slot that is asked for is not asked for again before it is known to be there");
constexpr int WAITING = 2;                    // the same while the program waits for others: messages stand in line
constexpr int LINE = DEPTH * 2 + 64;          // bytes of a row in a slot: eight threads find theirs in different banks
constexpr int SLOT = TILE * LINE;
constexpr int NORMED = HIDDEN * 2 + 64;       // bytes of a normed row
constexpr int SUMS = ROWS + 1;                // sums of a row of weights, and one for the banks
constexpr int SHARE = TILE * SUMS;            // sums of a warp
constexpr int VECTORS = HIDDEN / 256;         // of eight numbers, of a thread that norms a row

// Of `_Step` in launch.py.
struct Step {
    const u16 *attended, *residual, *output, *norm, *gate_up, *down, *next_norm, *next, *bias;
    u16 *middle, *gated, *result, *residual_out;
    u64 *arrived;                             // programs that have arrived at a meeting, of all launches
    int rows, attended_row, heads, inner, columns;    // columns 0: no next attention
    float epsilon;
    u32 nothing;                              // 0, which the compiler does not know
};

// -- numbers and memory

__device__ __forceinline__ float wide(u32 bits) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ u32 narrow(float low, float high) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
__device__ __forceinline__ u16 narrow(float number) { return (u16)narrow(number, 0.f); }
__device__ __forceinline__ float rounded(float number) { return wide(narrow(number)); }

__device__ __forceinline__ u32 place(const void *shared) { return (u32)__cvta_generic_to_shared(shared); }
__device__ __forceinline__ uint4 near(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
// What other programs wrote, past the multiprocessor's own cache. The compiler may move __ldcg to before a barrier.
__device__ __forceinline__ uint4 far(const u16 *at) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}
__device__ __forceinline__ float far_number(const u16 *at) {
    u16 bits;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(bits) : "l"(at));
    return wide(bits);
}

// -- waiting

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

// Waits for all threads that multiply.
__device__ __forceinline__ void together() { asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory"); }

// Waits for all programs: what they wrote before can be read after. Where not all of them run at the same time, it ends
// the launch with an error after 20e9 cycles, ten seconds, and would otherwise wait without end.
__device__ __forceinline__ void meet(u64 *arrived) {
    together();
    if (threadIdx.x == 0) {
        u64 ticket, seen, programs = gridDim.x;
        asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], 1;" : "=l"(ticket) : "l"(arrived) : "memory");
        u64 all = (ticket / programs + 1) * programs;
        long long begun = clock64();
        do {
            asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(arrived) : "memory");
            if (clock64() - begun > 20000000000ll) __trap();
        } while (seen < all);
    }
    together();
}

// -- weights

struct Product {
    const u16 *weight;
    int tiles, depth;
};
__device__ __forceinline__ Product product(const Step &step, int number) {
    if (number == 0) return {step.output, HIDDEN / TILE, step.heads};
    if (number == 1) return {step.gate_up, step.inner * 2 / TILE, HIDDEN};
    if (number == 2) return {step.down, HIDDEN / TILE, step.inner};
    return {step.next, step.columns / TILE, HIDDEN};
}

// Copies a loader's rows of all tiles, by one thread.
__device__ void load(const Step &step, u32 ring, u32 full, u32 empty, const volatile int *waiting, int loader) {
    u64 once;    // the cache is for activations
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    int slot = 0, behind = 0, under_way = 0, before = 0;
    u32 parity = 1, parity_behind = 0;
    for (int number = 0; number < 4; number++) {
        Product p = product(step, number);
        int first = ((int)blockIdx.x + before) % (int)gridDim.x;
        before += gridDim.x - p.tiles % gridDim.x;
        for (int tile = first; tile < p.tiles; tile += gridDim.x) {
            int row = tile * TILE + loader * MINE;
            // Gate and up of the same eight numbers are in one tile.
            if (number == 1) row = tile * 8 + loader * MINE % 8 + (loader * MINE < 8 ? 0 : step.inner);
            const u16 *from = p.weight + (u64)row * p.depth;
            for (int begin = 0; begin < p.depth; begin += DEPTH) {
                // With everything asked for at once, what is needed first would arrive with what is needed last.
                while (under_way >= (*waiting ? WAITING : UNDER_WAY)) {
                    wait(full + behind * 8, parity_behind);
                    if (++behind == STAGES) behind = 0, parity_behind ^= 1;
                    under_way--;
                }
                under_way++;
                wait(empty + slot * 8, parity);
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full + slot * 8),
                             "n"(MINE * DEPTH * 2)
                             : "memory");
#pragma unroll
                for (int i = 0; i < MINE; i++)
                    asm volatile(
                        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                        "[%0], [%1], %2, [%3], %4;" ::"r"(ring + slot * SLOT + (loader * MINE + i) * LINE),
                        "l"(from + (u64)i * p.depth + begin), "n"(DEPTH * 2), "r"(full + slot * 8), "l"(once)
                        : "memory");
                if (++slot == STAGES) slot = 0, parity ^= 1;
            }
        }
    }
}

struct Ring {
    u32 slots, full, empty, parity;
    int slot;
};

struct Weights {
    uint4 upper[HALVES], lower[HALVES];
};

// Reads the next slot.
__device__ __forceinline__ void fetch(Ring &ring, Weights &w, int warp, int lane) {
    wait(ring.full + ring.slot * 8, ring.parity);
    u32 at = ring.slots + ring.slot * SLOT + lane / 4 * LINE + warp * (DEPTH / WARPS * 2) + lane % 4 * 16;
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        w.upper[half] = near(at + half * 64);
        w.lower[half] = near(at + 8 * LINE + half * 64);
    }
}

// Gives the slot back, after what was read of it has arrived: the next copy was seen to be there before that.
__device__ __forceinline__ void release(Ring &ring, const Weights &w, u32 nothing, int lane) {
    u32 zero = (w.upper[0].x ^ w.lower[0].x ^ w.upper[HALVES - 1].w ^ w.lower[HALVES - 1].w) & nothing;
    __syncwarp();
    if (lane == 0)
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(ring.empty + ring.slot * 8 + zero) : "memory");
    if (++ring.slot == STAGES) ring.slot = 0, ring.parity ^= 1;
}

// -- products

__device__ __forceinline__ void multiply(float *sums, u32 a, u32 b, u32 c, u32 d, u32 x, u32 y) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a), "r"(b), "r"(c), "r"(d), "r"(x), "r"(y));
}

// Adds the products of a warp's part of a slot with activations. Threads hold eight numbers beside each other of a row
// of weights and of one of activations. Tensor cores expect others, but the same ones of both, and the order of a sum's
// terms is free.
__device__ __forceinline__ void add(const Weights &w, const uint4 *x, float (*sums)[4]) {
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        uint4 u = w.upper[half], l = w.lower[half], b = x[half];
        multiply(sums[0], u.x, l.x, u.y, l.y, b.x, b.y);
        multiply(sums[1], u.z, l.z, u.w, l.w, b.z, b.w);
    }
}

// Sums of a tile with activations in global memory. Each slot is read while the one before it is multiplied.
__device__ __forceinline__ void sums_with(Ring &ring, const u16 *x, int x_row, int rows, int depth,
                                          float (*sums)[4], u32 nothing, int warp, int lane) {
    uint4 ahead[AHEAD][HALVES];
    const u16 *mine = x + (u64)(lane / 4) * x_row + warp * (DEPTH / WARPS) + lane % 4 * 8;
    auto ask = [&](uint4 *to, int begin) {
#pragma unroll
        for (int half = 0; half < HALVES; half++)
            to[half] = begin < depth && lane / 4 < rows ? far(mine + begin + half * 32) : uint4{0, 0, 0, 0};
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) ask(ahead[i], i * DEPTH);
    Weights w[2];
    for (int begin = 0; begin < depth; begin += AHEAD * DEPTH) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (begin + i * DEPTH < depth) {
                fetch(ring, w[i % 2], warp, lane);
                if (begin + i > 0) {
                    add(w[(i + 1) % 2], ahead[(i + AHEAD - 1) % AHEAD], sums);
                    ask(ahead[(i + AHEAD - 1) % AHEAD], begin + (i + AHEAD - 1) * DEPTH);
                }
                release(ring, w[i % 2], nothing, lane);
            }
        }
    }
    int last = (depth / DEPTH - 1) % AHEAD;
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (i == last) add(w[i % 2], ahead[i], sums);
}

// Sums of a tile with the normed rows.
__device__ __forceinline__ void sums_with_normed(Ring &ring, u32 x, float (*sums)[4], u32 nothing, int warp, int lane) {
    x += lane / 4 * NORMED + warp * (DEPTH / WARPS * 2) + lane % 4 * 16;
    Weights w[2];
    uint4 b[2][HALVES];
    constexpr int SLOTS = HIDDEN / DEPTH;
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
#pragma unroll
        for (int half = 0; half < HALVES; half++) b[i % 2][half] = near(x + i * DEPTH * 2 + half * 64);
        fetch(ring, w[i % 2], warp, lane);
        if (i) add(w[(i + 1) % 2], b[(i + 1) % 2], sums);
        release(ring, w[i % 2], nothing, lane);
    }
    add(w[(SLOTS + 1) % 2], b[(SLOTS + 1) % 2], sums);
}

// -- between products

// Norms rows into shared memory, each warp one. Rounds as vLLM's fused_add_rms_norm, but that the sum which is normed is
// rounded, too.
__device__ void norm(const Step &step, const u16 *x, const u16 *weight, char *to, int row, int lane) {
    static_assert(ROWS == WARPS, "a row for each warp");
    uint4 v[VECTORS];
    float square = 0.f;
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        v[i] = row < step.rows ? far(x + row * HIDDEN + (i * 32 + lane) * 8) : uint4{0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const u32 *pair = &v[i].x;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float low = wide(pair[j] & 0xffff), high = wide(pair[j] >> 16);
            square += low * low + high * high;
        }
    }
#pragma unroll
    for (int other = 16; other; other /= 2) square += __shfl_xor_sync(~0u, square, other);
    float scale = rsqrtf(square / HIDDEN + step.epsilon);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        uint4 w = __ldg((const uint4 *)(weight + (i * 32 + lane) * 8));
        u32 *pair = &v[i].x;
        const u32 *factor = &w.x;
#pragma unroll
        for (int j = 0; j < 4; j++)
            pair[j] = narrow(rounded(wide(pair[j] & 0xffff) * scale) * wide(factor[j] & 0xffff),
                             rounded(wide(pair[j] >> 16) * scale) * wide(factor[j] >> 16));
        *(uint4 *)(to + row * NORMED + (i * 32 + lane) * 16) = v[i];
    }
    together();
}

__device__ __forceinline__ float total(const float *shares, int row, int col) {
    float sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) sum += shares[warp * SHARE + row * SUMS + col];
    return sum;
}

// Row of activations and place in a tile of what a thread finishes, if there is such a row. Gate and up are one place.
__device__ __forceinline__ bool finishes(const Step &step, int places, int &row, int &col) {
    row = threadIdx.x / places, col = threadIdx.x % places;
    return row < ROWS && row < step.rows;
}

// Writes what a tile's sums are for. `held` is the number of the residual that is added.
__device__ __forceinline__ void finish(const Step &step, int number, int tile, const float *shares, float held) {
    int row, col;
    if (number == 1) {
        if (!finishes(step, 8, row, col)) return;
        float gate = rounded(total(shares, col, row)), up = rounded(total(shares, col + 8, row));
        step.gated[row * step.inner + tile * 8 + col] = narrow(rounded(gate / (1.f + __expf(-gate))) * up);
        return;
    }
    if (!finishes(step, TILE, row, col)) return;
    int at = tile * TILE + col;
    float sum = total(shares, col, row);
    if (number == 0) {
        step.middle[row * HIDDEN + at] = narrow(rounded(sum) + held);
    } else if (number == 2) {
        // Without a next attention the sum is left to the norm that follows.
        if (step.columns == 0) step.result[row * HIDDEN + at] = narrow(sum);
        step.residual_out[row * HIDDEN + at] = narrow(step.columns == 0 ? held : rounded(sum) + held);
    } else {
        if (step.bias) sum += wide(step.bias[at]);
        step.result[row * step.columns + at] = narrow(sum);
    }
}

extern "C" __global__ void __launch_bounds__((WARPS + LOADERS) * 32, 1) between(const __grid_constant__ Step step) {
    extern __shared__ __align__(128) char memory[];
    char *normed = memory + STAGES * SLOT;
    float *shares = (float *)(normed + ROWS * NORMED);
    u64 *barriers = (u64 *)(shares + 2 * WARPS * SHARE);
    volatile int *waiting = (volatile int *)(barriers + 2 * STAGES);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 full = place(barriers), empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < STAGES; slot++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(full + slot * 8), "n"(LOADERS) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + slot * 8), "n"(WARPS) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        *waiting = 1;
    }
    __syncthreads();
    if (warp >= WARPS) {
        // No earlier kernel of a step writes weights.
        if (lane == 0) load(step, place(memory), full, empty, waiting, warp - WARPS);
        return;
    }
    if (threadIdx.x * 64 < HIDDEN) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(step.norm + threadIdx.x * 64));
        if (step.columns) asm volatile("prefetch.global.L2 [%0];" ::"l"(step.next_norm + threadIdx.x * 64));
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // Only now: a kernel that begins earlier would not know that those before this one have ended.
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    Ring ring = {place(memory), full, empty, 0, 0};
    int before = 0, tiles = 0;
    for (int number = 0; number < (step.columns ? 4 : 3); number++) {
        Product p = product(step, number);
        if (number) {
            if (threadIdx.x == 0) *waiting = 1;
            meet(step.arrived);
            if (number == 1) norm(step, step.middle, step.norm, normed, warp, lane);
            if (number == 3) norm(step, step.residual_out, step.next_norm, normed, warp, lane);
            if (threadIdx.x == 0) *waiting = 0;
        }
        int first = ((int)blockIdx.x + before) % (int)gridDim.x;
        before += gridDim.x - p.tiles % gridDim.x;
        for (int tile = first; tile < p.tiles; tile += gridDim.x, tiles++) {
            float sums[2][4] = {}, held = 0.f;
            int row, col;
            if (number % 2 == 0 && finishes(step, TILE, row, col))
                held = far_number((number ? step.middle : step.residual) + row * HIDDEN + tile * TILE + col);
            if (number == 0)
                sums_with(ring, step.attended, step.attended_row, step.rows, p.depth, sums, step.nothing, warp, lane);
            else if (number == 2)
                sums_with(ring, step.gated, step.inner, step.rows, p.depth, sums, step.nothing, warp, lane);
            else
                sums_with_normed(ring, place(normed), sums, step.nothing, warp, lane);
            // Two buffers in turn: a warp may write the next tile's sums while another still reads these.
            float *buffer = shares + tiles % 2 * WARPS * SHARE, *mine = buffer + warp * SHARE;
#pragma unroll
            for (int i = 0; i < 4; i++)
                mine[(lane / 4 + i / 2 * 8) * SUMS + lane % 4 * 2 + i % 2] = sums[0][i] + sums[1][i];
            together();
            finish(step, number, tile, buffer, held);
        }
    }
}
