"""The operators of TorchScript: which are torch's own and only compute, which write files or reach
other machines.

An operator is judged by its namespace and its name. Those of `aten` are a list, that of torch 2.13
and some that older versions had, without the ends that tell the variants of one operator. Source:
`torch._C._jit_get_all_schemas()`.
"""

from __future__ import annotations

from ckptconv.objects.threats import Verdict

_ATEN_NAMES = """
    Bool Complex ComplexImplicit Delete Float FloatImplicit Generator Int IntImplicit ScalarImplicit
    Size abs absolute acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d add add_batch_dim add_relu addbmm
    addcdiv addcmul addmm addmm_activation addmv addr adjoint affine_grid_generator alias all
    allclose alpha_dropout amax amin aminmax amp_foreach_non_finite_check_and_unscale
    amp_update_scale and angle any append arange arccos arccosh arcsin arcsinh arctan arctan2
    arctanh argmax argmin argsort argwhere as_strided as_strided_scatter as_tensor asin asinh
    assert_async assert_scalar assert_tensor_metadata atan atan2 atanh atleast_1d atleast_2d
    atleast_3d autocast_to_full_precision autocast_to_reduced_precision avg_pool1d avg_pool2d
    avg_pool3d backward baddbmm baddbmm_mkl bartlett_window batch_norm batch_norm_backward_elemt
    batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats
    batch_norm_gather_stats_with_counts batch_norm_impl_index batch_norm_no_update batch_norm_stats
    batch_norm_update_stats batch_norm_with_update batch_norm_with_update_functional bernoulli
    bilinear bin binary_cross_entropy binary_cross_entropy_with_logits bincount binomial bitwise_and
    bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor blackman_window
    block_diag bmm broadcast_shapes broadcast_tensors broadcast_to bucketize can_cast capitalize
    cartesian_prod cast_Byte cast_Char cast_Double cast_Float cast_Half cast_Int cast_Long
    cast_Short cat cauchy ccol_indices cdist ceil celu center chain_matmul chalf channel_shuffle
    cholesky cholesky_inverse cholesky_solve cholesky_solve_helper choose_qparams_optimized
    choose_qparams_per_tensor chr chunk chunk_cat clamp clamp_max clamp_min clear clip clone
    coalesce coalesced col2im col_indices column_stack combinations complex
    compute_linear_combination concat concatenate confirmed_by_owner conj conj_physical
    constant_pad_nd contains contiguous conv1d conv2d conv3d conv_depthwise2d conv_depthwise3d
    conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convert_indices_from_coo_to_csr
    convert_indices_from_csr_to_coo convert_weight_to_int4pack convert_weight_to_int4pack_for_cpu
    convolution convolution_backward_overrideable convolution_mode convolution_overrideable copy
    copy_from copy_from_and_resize copy_sparse_to_sparse copysign corrcoef cos cosh
    cosine_embedding_loss cosine_similarity count count_nonzero cov cpu cross cross_entropy_loss
    crow_indices cslt_compress cslt_sparse_mm cslt_sparse_mm_search ctc_loss cuda
    cudnn_affine_grid_generator cudnn_attention cudnn_batch_norm cudnn_convolution
    cudnn_convolution_add_relu cudnn_convolution_relu cudnn_convolution_transpose cudnn_ctc_loss
    cudnn_grid_sampler cudnn_init_dropout_state cudnn_is_acceptable cudnn_rnn cudnn_rnn_flatten
    cufft_clear_plan_cache cufft_get_plan_cache_max_size cufft_get_plan_cache_size
    cufft_set_plan_cache_max_size cummax cummax_helper cummaxmin cummin cummin_helper cumprod cumsum
    cumulative_trapezoid data debug_has_internal_overlap deg2rad degrees dense_dim dequantize
    derive_index det detach device diag diag_embed diagflat diagonal diagonal_scatter dict diff
    digamma dim dimI dimV dim_arange dirichlet_grad dist div divide divmod dot dropout dsplit dstack
    dyn_quant_matmul_4bit dyn_quant_pack_4bit efficient_attention efficientzerotensor eig einsum
    element_size elu embedding embedding_bag embedding_bag_dense embedding_bag_forward_only
    embedding_bag_per_sample_weights embedding_bag_sparse embedding_dense embedding_renorm
    embedding_sparse empty empty_affine_quantized empty_like empty_per_channel_affine_quantized
    empty_permuted empty_quantized empty_strided endswith eq equal erf erfc erfinv euclidean_dist
    exp exp2 expand expand_as expandtabs expm1 exponential extend eye fabs factorial
    fake_quantize_learnable_per_channel_affine fake_quantize_learnable_per_tensor_affine
    fake_quantize_per_channel_affine fake_quantize_per_channel_affine_cachemask
    fake_quantize_per_tensor_affine fake_quantize_per_tensor_affine_cachemask
    fake_quantize_per_tensor_affine_cachemask_tensor_qparams fbgemm_linear_fp16
    fbgemm_linear_fp16_weight_fp32_activation fbgemm_linear_int8
    fbgemm_linear_int8_weight_fp32_activation fbgemm_linear_quantize fbgemm_pack_gemm_matrix_fp16
    fbgemm_pack_quantized_matrix feature_alpha_dropout feature_dropout fft fft_c2c fft_c2r fft_fft
    fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2
    fft_ifftn fft_ifftshift fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_r2c
    fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn fill fill_diagonal fill_mem_eff_dropout_mask find fix
    flash_attention flash_attention_forward_no_dropout_inplace flatten flatten_dense_tensors flip
    fliplr flipud float_power floor floor_divide floordiv fmax fmin fmod foobar foreach foreach_abs
    foreach_acos foreach_add foreach_addcdiv foreach_addcmul foreach_asin foreach_atan foreach_ceil
    foreach_clamp_max foreach_clamp_min foreach_clone foreach_cos foreach_cosh foreach_div
    foreach_erf foreach_erfc foreach_exp foreach_expm1 foreach_floor foreach_frac foreach_lerp
    foreach_lgamma foreach_log foreach_log10 foreach_log1p foreach_log2 foreach_max foreach_maximum
    foreach_minimum foreach_mm foreach_mul foreach_neg foreach_norm foreach_pow foreach_powsum
    foreach_reciprocal foreach_round foreach_rsqrt foreach_sigmoid foreach_sign foreach_sin
    foreach_sinh foreach_sqrt foreach_sub foreach_tan foreach_tanh foreach_trunc foreach_zero format
    frac fractional_max_pool2d fractional_max_pool3d frexp frobenius_norm full full_like
    functional_assert_async functional_assert_scalar functional_sym_constrain_range
    functional_sym_constrain_range_for_size fused_adagrad fused_adam fused_adamw fused_dropout
    fused_moving_avg_obs_fake_quant fused_moving_avg_obs_fq_helper
    fused_moving_avg_obs_fq_helper_functional fused_rms_norm fused_sdp_choice fused_sgd fw_primal
    gamma gather gather_sparse gcd ge gelu geometric geqrf ger get get_autocast_dtype
    get_cpu_capability get_device get_gradients get_tracing_state getitem glu grad grad_sum_to_size
    gradient greater greater_equal grid_sampler grid_sampler_2d grid_sampler_2d_cpu_fallback
    grid_sampler_3d group_norm grouped_mm gru gru_cell gt hamming_window hann_window hardshrink
    hardsigmoid hardswish hardtanh has_compatible_shallow_copy_type has_same_storage_numel
    has_torch_function hash hash_tensor heaviside hex hinge_embedding_loss histc histogram
    histogramdd histogramdd_bin_edges histogramdd_from_bin_cts histogramdd_from_bin_tensors hsplit
    hspmm hstack huber_loss hypot i0 iand ifft igamma igammac ilshift im2col imag index index_add
    index_fill index_put index_put_impl index_reduce index_select indices infer_size
    infinitely_differentiable_gelu initial_seed inner insert instance_norm int_mm int_repr
    interpolate inverse ior irfft irshift is is_all_true is_any_true is_autocast_cpu_enabled
    is_autocast_enabled is_coalesced is_complex is_conj is_contiguous is_cuda is_distributed
    is_floating_point is_grad_enabled is_inference is_leaf is_neg is_non_overlapping_and_dense
    is_nonzero is_owner is_pinned is_same_size is_scripting is_set_to is_signed
    is_strides_like_format is_vulkan_available is_zerotensor isalnum isalpha isclose isdecimal
    isdigit isfinite isidentifier isin isinf islower isnan isneginf isnot isnumeric isposinf
    isprintable isreal isspace istft istitle isupper item items ixor jagged_to_padded_dense join
    kaiser_window keys kl_div kron kthvalue l1_loss layer_norm lazy_clone lcm ldexp le leaky_relu
    legacy len lerp less less_equal lgamma lift lift_fresh linalg__powsum linalg_check_errors
    linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cross linalg_det linalg_diagonal
    linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv
    linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu
    linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_matmul linalg_matrix_exp
    linalg_matrix_norm linalg_matrix_power linalg_matrix_rank linalg_multi_dot linalg_norm
    linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex linalg_solve_triangular
    linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve linalg_vander linalg_vecdot
    linalg_vector_norm linear linspace list list_to_tensor ljust local_scalar_dense local_value log
    log10 log1p log2 log_normal log_sigmoid log_softmax logaddexp logaddexp2 logcumsumexp logdet
    logical_and logical_not logical_or logical_xor logit logspace logsumexp lower lshift lstm
    lstm_cell lstm_mps lstrip lstsq lt lu_solve lu_unpack lu_with_info mH mT make_dep_token
    make_dual make_per_channel_quantized_tensor make_per_tensor_quantized_tensor manual_seed
    margin_ranking_loss masked_fill masked_scale masked_scatter masked_select masked_softmax
    mathremainder matmul matrix_H matrix_exp matrix_power matrix_rank max max_pool1d
    max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices
    max_unpool2d max_unpool3d maximum mean median meshgrid min minimum miopen_batch_norm
    miopen_convolution miopen_convolution_add_relu miopen_convolution_relu
    miopen_convolution_transpose miopen_ctc_loss miopen_depthwise_convolution miopen_rnn mish
    mixed_dtypes_linear mkldnn_adaptive_avg_pool2d mkldnn_convolution mkldnn_linear
    mkldnn_linear_backward_weights mkldnn_max_pool2d mkldnn_max_pool3d mkldnn_reorder_conv2d
    mkldnn_reorder_conv3d mkldnn_reshape mkldnn_rnn_layer mkldnn_transpose mm mode modf moveaxis
    movedim mps_convolution mps_convolution_transpose mse_loss msort mul multi_margin_loss
    multilabel_margin_loss multinomial multinomial_alias_draw multinomial_alias_setup multiply mv
    mvlgamma nan_to_num nanmean nanmedian nanquantile nansum narrow native_batch_norm
    native_batch_norm_legit native_batch_norm_legit_functional native_batch_norm_legit_no_training
    native_channel_shuffle native_dropout native_group_norm native_layer_norm
    native_multi_head_attention native_norm ncf_unsqueeze ncf_view ne neg neg_view negative
    nested_compute_contiguous_strides_offsets nested_from_padded
    nested_from_padded_and_nested_example nested_from_padded_tensor nested_get_jagged_dummy
    nested_get_lengths nested_get_max_seqlen nested_get_min_seqlen nested_get_offsets
    nested_get_ragged_idx nested_get_values nested_select nested_sum nested_tensor_from_mask
    nested_tensor_from_mask_left_aligned nested_tensor_from_tensor_list nested_tensor_size
    nested_tensor_softmax_with_shape nested_tensor_storage_offsets nested_tensor_strides
    nested_to_padded_tensor nested_view_from_buffer nested_view_from_jagged new_empty
    new_empty_strided new_full new_ones new_zeros new_zeros_with_same_feature_meta nextafter
    nll_loss nll_loss2d nll_loss_nd nnpack_available nnpack_spatial_convolution nnz
    no_grad_embedding_renorm no_grad_fill no_grad_normal no_grad_uniform no_grad_zero nonzero
    nonzero_numpy nonzero_static norm norm_except_dim normal normal_functional not not_equal
    nuclear_norm numel numpy_T oct one_hot ones ones_like or ord orgqr ormqr outer output_nr owner
    owner_name pack_padded_sequence pack_sequence pad pad_circular pad_enum pad_packed_sequence
    pad_sequence padded_dense_to_jagged pairwise_distance partition pdist percentFormat permute
    philox_key_fold_in philox_key_split philox_normal philox_uniform pin_memory pinverse
    pixel_shuffle pixel_unshuffle poisson poisson_nll_loss polar polygamma pop popitem positive pow
    prelu prelu_kernel print prod promote_types propagate_xla put q_per_channel_axis
    q_per_channel_scales q_per_channel_zero_points q_scale q_zero_point qr qscheme quantile
    quantize_linear quantize_per_channel quantize_per_tensor quantize_per_tensor_dynamic
    quantized_batch_norm quantized_gru quantized_gru_cell quantized_lstm quantized_lstm_cell
    quantized_max_pool1d quantized_max_pool2d quantized_max_pool3d quantized_rnn_relu_cell
    quantized_rnn_tanh_cell rad2deg radians rand rand_like randint randint_like randn randn_like
    random randperm range range_length ravel real reciprocal record_stream reflection_pad1d
    reflection_pad2d reflection_pad3d relu relu6 remainder remove remove_batch_dim renorm repeat
    repeat_interleave replace replication_pad1d replication_pad2d replication_pad3d requires_grad
    reshape reshape_alias reshape_as reshape_from_tensor resize resize_as resize_as_sparse
    resize_output resolve_conj resolve_neg result_type retain_grad retains_grad reverse rfft rfind
    rindex rjust rms_norm rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell roll rot90 round
    round_to_zero_floordiv row_indices row_stack rowwise_prune rpartition rrelu rrelu_with_noise
    rrelu_with_noise_functional rshift rsplit rsqrt rstrip rsub s_where safe_softmax
    sample_dirichlet saturate_weight_to_fp16 scalar_tensor scaled_dot_product_attention
    scaled_dot_product_attention_math scaled_dot_product_attention_math_for_mps
    scaled_dot_product_cudnn_attention scaled_dot_product_efficient_attention
    scaled_dot_product_flash_attention scaled_dot_product_flash_attention_for_cpu
    scaled_dot_product_fused_attention_overrideable scaled_grouped_mm scaled_grouped_mm_v2 scaled_mm
    scaled_mm_v2 scatter scatter_add scatter_reduce searchsorted seed segment_reduce select
    select_scatter selu set set_grad_enabled set_item setdefault setitem sgn shape_as_tensor sigmoid
    sign signbit silu sin sinc sinh size size_if_not_equal slice slice_inverse slice_scatter slogdet
    slow_conv2d slow_conv3d slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d
    slow_conv_transpose3d smm smooth_l1_loss sobol_engine_draw sobol_engine_ff
    sobol_engine_initialize_state sobol_engine_scramble soft_margin_loss softmax softplus softshrink
    solve sort sorted sparse_addmm sparse_broadcast_to sparse_bsc_tensor sparse_bsc_tensor_unsafe
    sparse_bsr_tensor sparse_bsr_tensor_unsafe sparse_compressed_tensor
    sparse_compressed_tensor_unsafe sparse_compressed_tensor_with_dims sparse_coo_tensor
    sparse_coo_tensor_unsafe sparse_coo_tensor_with_dims sparse_coo_tensor_with_dims_and_tensors
    sparse_csc_tensor sparse_csc_tensor_unsafe sparse_csr_prod sparse_csr_sum sparse_csr_tensor
    sparse_csr_tensor_unsafe sparse_dim sparse_log_softmax sparse_mask sparse_mask_projection
    sparse_mm sparse_mm_reduce_impl sparse_resize sparse_resize_and_clear sparse_sampled_addmm
    sparse_semi_structured_addmm sparse_semi_structured_apply sparse_semi_structured_apply_dense
    sparse_semi_structured_linear sparse_semi_structured_mm sparse_semi_structured_tile
    sparse_softmax sparse_sparse_matmul sparse_sum spdiags special_airy_ai special_bessel_j0
    special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
    special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w
    special_digamma special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2
    special_expit special_expm1 special_gammainc special_gammaincc special_gammaln
    special_hermite_polynomial_h special_hermite_polynomial_he special_i0 special_i0e special_i1
    special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p special_log1p
    special_log_ndtr special_log_softmax special_logit special_logsumexp special_modified_bessel_i0
    special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
    special_multigammaln special_ndtr special_ndtri special_polygamma special_psi special_round
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_sinc
    special_softmax special_spherical_bessel_j0 special_xlog1py special_xlogy special_zeta split
    split_with_sizes splitlines spsolve sqrt square squeeze sspaddmm stack standard_gamma
    standard_gamma_grad startswith std std_mean stft storage_offset str stride strip sub subtract
    sum sum_to_size svd swapaxes swapcase swapdims sym_constrain_range sym_constrain_range_for_size
    sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride symeig t take take_along_dim
    tan tanh tensor tensor_split tensor_to_list tensordot test_ambiguous_defaults
    test_autograd_multiple_dispatch test_autograd_multiple_dispatch_view test_check_tensor
    test_functorch_fallback test_optional_filled_intlist test_optional_floatlist
    test_optional_intlist test_parallel_materialize test_serialization_subcmul test_string_default
    test_warn_in_autograd thnn_conv2d thnn_conv3d thnn_conv_depthwise2d thnn_differentiable_gru_cell
    thnn_differentiable_lstm_cell thnn_fused_gru_cell thnn_fused_lstm_cell
    thnn_fused_lstm_cell_backward_impl threshold tile title to to_cpu to_dense to_here to_mkldnn
    to_padded_tensor to_sparse to_sparse_bsc to_sparse_bsr to_sparse_csc to_sparse_csr
    to_sparse_semi_structured topk trace transform_bias_rescale_qkv transformer_encoder_layer_fwd
    transpose trapezoid trapz triangular_solve tril tril_indices trilinear triplet_margin_loss
    triton_multi_head_attention triton_scaled_dot_attention triu triu_indices true_divide trunc
    type_as unbind unchecked_unwrap_optional unflatten unflatten_dense_tensors unfold uniform unique
    unique2 unique_consecutive unique_dim unique_dim_consecutive unpack_dual unsafe_chunk
    unsafe_index unsafe_index_put unsafe_masked_index unsafe_masked_index_put_accumulate
    unsafe_split unsafe_split_with_sizes unsafe_view unsqueeze unwrap_optional update upper upsample
    upsample_bicubic2d upsample_bicubic2d_aa upsample_bilinear upsample_bilinear2d
    upsample_bilinear2d_aa upsample_lanczos2d_aa upsample_linear1d upsample_nearest
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_nearest_exact1d
    upsample_nearest_exact2d upsample_nearest_exact3d upsample_trilinear3d use_cudnn_ctc_loss
    use_cudnn_rnn_flatten use_miopen_ctc_loss validate_compressed_sparse_indices
    validate_sparse_bsc_tensor_args validate_sparse_bsr_tensor_args
    validate_sparse_compressed_tensor_args validate_sparse_coo_tensor_args
    validate_sparse_csc_tensor_args validate_sparse_csr_tensor_args value_selecting_reduction values
    vander var var_mean vdot version view view_as view_as_complex view_as_real vsplit vstack wait
    warn weight_int4pack_mm weight_int4pack_mm_for_cpu weight_int4pack_mm_with_scales_and_zeros
    weight_int8pack_mm weight_norm weight_norm_differentiable weight_norm_interface where
    wrapped_linear_prepack wrapped_quantized_linear_prepacked xlogy xor zero zeros zeros_like zfill
"""
_ATEN = frozenset(_ATEN_NAMES.split())
_VARIANTS = (
    "_backward",
    "_copy",
    "_out",
    "_forward",
    "_jvp",
    "_double",
    "_data",
    "_input",
    "_weight",
    "_bias",
)
_NAMESPACES = """
    prim prims quantized _quantized quantization sparse mkldnn mkldnn_prepacked mkl onednn prepacked
    xnnpack onnx profiler static_runtime cuda metal metal_prepack vulkan vulkan_prepack rngprims
"""
_COMPUTING = frozenset(_NAMESPACES.split())
"""The namespaces of torch all of whose operators compute, but for those below."""
_FILES = "reads or writes the file that it is given"
_MACHINES = "calls other machines"
_DANGEROUS = {
    "aten::save": _FILES,
    "aten::from_file": _FILES,
    "debugprims::load_tensor": _FILES,
    "prim::rpc_async": _MACHINES,
    "prim::rpc_sync": _MACHINES,
    "prim::rpc_remote": _MACHINES,
    "prim::PythonOp": "runs a function of Python",
    "prim::IgnoredPythonOp": "runs a function of Python",
}


def judge_operator(namespace: str, name: str) -> Verdict:
    """How a call of `namespace::name` in the code of a TorchScript archive is judged."""
    if reason := _DANGEROUS.get(f"{namespace}::{name}"):
        return Verdict("dangerous", reason)
    if namespace in _COMPUTING or (namespace == "aten" and _base(name) in _ATEN):
        return Verdict("plain", "computes")
    return Verdict("unknown", "an unknown operator; its code would run where it is installed")


def _base(name: str) -> str:
    """The name of an operator without its variant: `_foo_backward_` and `foo_out` are `foo`."""
    while True:
        short = name.strip("_") or name
        for end in _VARIANTS:
            short = short.removesuffix(end)
        if short in ("", name):
            return name
        name = short
