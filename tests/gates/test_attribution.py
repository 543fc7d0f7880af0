"""Where a step's time goes: kernels by class, and the class that a reason names."""

from __future__ import annotations

import pytest
from narrowgate.gates.attribution import by_class, kernel_class, owner_of_loss
from narrowgate.gates.measurements import KernelClass


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("nvjet_sm90_qqtst_192x192_128x4_2x1_v_bz_coopB_TNN", "gemm fp8"),
        ("nvjet_sm90_qrtst_128x128_128x6_2x1_v_bz_coopA_algo2_TNT", "gemm fp8"),
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NTN", "gemm"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<float_e4m3_t>>", "gemm fp8"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "gemm"),
        ("cast_kernel", "cast"),
        ("amax_kernel", "amax"),
        ("scale_kernel", "amax"),
        ("roll_kernel", "amax"),
        ("quantized_sums_kernel", "cast"),
        ("rowwise_adagrad_kernel", "optimizer"),
        ("_adam_codes", "optimizer"),
        ("triton_per_fused__fused_rms_norm_cast_fp8_delayed_0", "cast"),
        ("triton_per_fused__fused_rms_norm__fused_rms_norm_backward_0", "norm"),
        ("triton_poi_fused_mul_silu_3", "activation"),
        ("triton_poi_fused_add_4", "elementwise"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("void at::native::embedding_backward_feature_kernel", "embedding"),
        ("void transformer_engine::detail::cast_transpose_general_kernel", "transpose"),
        ("Memset (Device)", "copies"),
    ],
)
def test_kernels_fall_into_classes_by_their_names(kernel, expected):
    assert kernel_class(kernel) == expected


def test_time_that_no_kernel_fills_is_gaps_and_classes_add_up_to_the_step():
    found = by_class([("amax_kernel", 2000.0), ("nvjet_sm90_tst_x", 6000.0), ("amax_kernel", 500.0)], 2, 10.0)
    assert found == {"amax": pytest.approx(1.25), "gemm": pytest.approx(3.0), "gaps": pytest.approx(5.75)}
    assert sum(found.values()) == pytest.approx(10.0)
    assert by_class([("amax_kernel", 30_000.0)], 2, 10.0)["gaps"] == 0.0


def test_the_class_that_grew_most_owns_the_loss_whatever_shrank():
    classes = [
        KernelClass(name="gemm", baseline_ms=9, candidate_ms=1),
        KernelClass(name="gemm fp8", baseline_ms=0, candidate_ms=5),
        KernelClass(name="cast", baseline_ms=0, candidate_ms=6),
        KernelClass(name="norm", baseline_ms=1, candidate_ms=1.5),
    ]
    assert owner_of_loss(classes) == "cast 0.000 to 6.000 ms"
    assert owner_of_loss([KernelClass(name="gemm", baseline_ms=2, candidate_ms=1)]) is None
    assert owner_of_loss([]) is None
