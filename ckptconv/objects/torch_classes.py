"""The classes of torch that whole modules, optimizers, random distributions and the metadata of
shards name.

They are those that torch 2.13 defines in these modules, and those that older versions defined
there. A name that a module merely imports is not listed: through it, other modules are reached.
"""

from __future__ import annotations

_CLASSES = """
    torch.nn.modules.activation Threshold ReLU RReLU Hardtanh ReLU6 Sigmoid Hardsigmoid Tanh SiLU
    Mish Hardswish ELU CELU SELU GLU GELU Hardshrink LeakyReLU LogSigmoid Softplus Softshrink
    MultiheadAttention PReLU Softsign Tanhshrink Softmin Softmax Softmax2d LogSoftmax
    torch.nn.modules.adaptive AdaptiveLogSoftmaxWithLoss
    torch.nn.modules.batchnorm _NormBase _BatchNorm _LazyNormBase BatchNorm1d LazyBatchNorm1d
    BatchNorm2d LazyBatchNorm2d BatchNorm3d LazyBatchNorm3d SyncBatchNorm
    torch.nn.modules.channelshuffle ChannelShuffle
    torch.nn.modules.container Container Sequential ModuleList ModuleDict ParameterList
    ParameterDict
    torch.nn.modules.conv _ConvNd Conv1d Conv2d Conv3d _ConvTransposeNd ConvTranspose1d
    ConvTranspose2d ConvTranspose3d _ConvTransposeMixin _LazyConvXdMixin LazyConv1d LazyConv2d
    LazyConv3d LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d
    torch.nn.modules.distance PairwiseDistance CosineSimilarity
    torch.nn.modules.dropout _DropoutNd Dropout Dropout1d Dropout2d Dropout3d AlphaDropout
    FeatureAlphaDropout
    torch.nn.modules.flatten Flatten Unflatten
    torch.nn.modules.fold Fold Unfold
    torch.nn.modules.instancenorm _InstanceNorm InstanceNorm1d LazyInstanceNorm1d InstanceNorm2d
    LazyInstanceNorm2d InstanceNorm3d LazyInstanceNorm3d
    torch.nn.modules.lazy _LazyProtocol LazyModuleMixin
    torch.nn.modules.linear Identity Linear NonDynamicallyQuantizableLinear Bilinear LazyLinear
    _LinearWithBias
    torch.nn.modules.linear_cross_entropy_options _AutoDefault LinearCrossEntropyOptions
    torch.nn.modules.loss _Loss _WeightedLoss L1Loss NLLLoss NLLLoss2d PoissonNLLLoss
    GaussianNLLLoss KLDivLoss MSELoss BCELoss BCEWithLogitsLoss HingeEmbeddingLoss
    MultiLabelMarginLoss SmoothL1Loss HuberLoss SoftMarginLoss CrossEntropyLoss
    LinearCrossEntropyLoss MultiLabelSoftMarginLoss CosineEmbeddingLoss MarginRankingLoss
    MultiMarginLoss TripletMarginLoss TripletMarginWithDistanceLoss CTCLoss
    torch.nn.modules.module _IncompatibleKeys _WrappedHook Module
    torch.nn.modules.normalization LocalResponseNorm CrossMapLRN2d LayerNorm GroupNorm RMSNorm
    torch.nn.modules.padding _CircularPadNd CircularPad1d CircularPad2d CircularPad3d _ConstantPadNd
    ConstantPad1d ConstantPad2d ConstantPad3d _ReflectionPadNd ReflectionPad1d ReflectionPad2d
    ReflectionPad3d _ReplicationPadNd ReplicationPad1d ReplicationPad2d ReplicationPad3d ZeroPad1d
    ZeroPad2d ZeroPad3d
    torch.nn.modules.pixelshuffle PixelShuffle PixelUnshuffle
    torch.nn.modules.pooling _MaxPoolNd MaxPool1d MaxPool2d MaxPool3d _MaxUnpoolNd MaxUnpool1d
    MaxUnpool2d MaxUnpool3d _AvgPoolNd AvgPool1d AvgPool2d AvgPool3d FractionalMaxPool2d
    FractionalMaxPool3d _LPPoolNd LPPool1d LPPool2d LPPool3d _AdaptiveMaxPoolNd AdaptiveMaxPool1d
    AdaptiveMaxPool2d AdaptiveMaxPool3d _AdaptiveAvgPoolNd AdaptiveAvgPool1d AdaptiveAvgPool2d
    AdaptiveAvgPool3d
    torch.nn.modules.rnn RNNBase RNN LSTM GRU RNNCellBase RNNCell LSTMCell GRUCell
    torch.nn.modules.sparse Embedding EmbeddingBag
    torch.nn.modules.transformer Transformer TransformerEncoder TransformerDecoder
    TransformerEncoderLayer TransformerDecoderLayer
    torch.nn.modules.upsampling Upsample UpsamplingNearest2d UpsamplingBilinear2d _UpsamplingBase
    torch.nn.parameter Parameter UninitializedParameter Buffer UninitializedBuffer
    torch.nn.parallel.data_parallel DataParallel
    torch.nn.parallel.distributed DistributedDataParallel
    torch.nn.parallel.distributed_cpu DistributedDataParallelCPU
    torch.nn.utils.parametrizations _OrthMaps _Orthogonal _WeightNorm _SpectralNorm
    torch.nn.utils.parametrize ParametrizationList
    torch.nn.utils.prune BasePruningMethod PruningContainer Identity RandomUnstructured
    L1Unstructured RandomStructured LnStructured CustomFromMask
    torch.nn.utils.rnn PackedSequence_ PackedSequence
    torch.nn.utils.spectral_norm SpectralNorm SpectralNormLoadStateDictPreHook
    SpectralNormStateDictHook
    torch.nn.utils.weight_norm WeightNorm
    torch.ao.nn.intrinsic.modules.fused _FusedModule ConvReLU1d ConvReLU2d ConvReLU3d LinearReLU
    ConvBn1d ConvBn2d ConvBnReLU1d ConvBnReLU2d ConvBn3d ConvBnReLU3d BNReLU2d BNReLU3d LinearBn1d
    LinearLeakyReLU LinearTanh ConvAdd2d ConvAddReLU2d
    torch.ao.nn.intrinsic.qat.modules.conv_fused _ConvBnNd ConvBn1d ConvBnReLU1d ConvReLU1d ConvBn2d
    ConvBnReLU2d ConvReLU2d ConvBn3d ConvBnReLU3d ConvReLU3d
    torch.ao.nn.intrinsic.qat.modules.linear_fused LinearBn1d
    torch.ao.nn.intrinsic.qat.modules.linear_relu LinearReLU
    torch.ao.nn.intrinsic.quantized.dynamic.modules.linear_relu LinearReLU
    torch.ao.nn.intrinsic.quantized.modules.bn_relu BNReLU2d BNReLU3d
    torch.ao.nn.intrinsic.quantized.modules.conv_add ConvAdd2d ConvAddReLU2d
    torch.ao.nn.intrinsic.quantized.modules.conv_relu ConvReLU1d ConvReLU2d ConvReLU3d
    torch.ao.nn.intrinsic.quantized.modules.linear_relu LinearReLU LinearLeakyReLU LinearTanh
    torch.ao.nn.qat.dynamic.modules.linear Linear
    torch.ao.nn.qat.modules.conv _ConvNd Conv1d Conv2d Conv3d
    torch.ao.nn.qat.modules.embedding_ops Embedding EmbeddingBag
    torch.ao.nn.qat.modules.linear Linear
    torch.ao.nn.quantizable.modules.activation MultiheadAttention
    torch.ao.nn.quantizable.modules.rnn LSTMCell _LSTMSingleLayer _LSTMLayer LSTM
    torch.ao.nn.quantized.dynamic.modules.conv Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d
    ConvTranspose3d
    torch.ao.nn.quantized.dynamic.modules.linear Linear
    torch.ao.nn.quantized.dynamic.modules.rnn PackedParameter RNNBase LSTM GRU RNNCellBase RNNCell
    LSTMCell GRUCell
    torch.ao.nn.quantized.modules Quantize DeQuantize
    torch.ao.nn.quantized.modules.activation ReLU6 Hardswish ELU LeakyReLU Sigmoid Softmax
    MultiheadAttention PReLU
    torch.ao.nn.quantized.modules.batchnorm _BatchNorm BatchNorm2d BatchNorm3d
    torch.ao.nn.quantized.modules.conv _ConvNd Conv1d Conv2d Conv3d _ConvTransposeNd ConvTranspose1d
    ConvTranspose2d ConvTranspose3d
    torch.ao.nn.quantized.modules.dropout Dropout
    torch.ao.nn.quantized.modules.embedding_ops EmbeddingPackedParams Embedding EmbeddingBag
    torch.ao.nn.quantized.modules.functional_modules FloatFunctional FXFloatFunctional QFunctional
    torch.ao.nn.quantized.modules.linear LinearPackedParams Linear
    torch.ao.nn.quantized.modules.normalization LayerNorm GroupNorm InstanceNorm1d InstanceNorm2d
    InstanceNorm3d
    torch.ao.nn.quantized.modules.rnn LSTM
    torch.ao.nn.quantized.modules.utils WeightedQuantizedModule
    torch.ao.nn.quantized.reference.modules.conv _ConvNd Conv1d Conv2d Conv3d _ConvTransposeNd
    ConvTranspose1d ConvTranspose2d ConvTranspose3d
    torch.ao.nn.quantized.reference.modules.linear Linear
    torch.ao.nn.quantized.reference.modules.rnn RNNCellBase RNNCell LSTMCell GRUCell RNNBase LSTM
    GRU
    torch.ao.nn.quantized.reference.modules.sparse Embedding EmbeddingBag
    torch.ao.nn.quantized.reference.modules.utils ReferenceQuantizedModule
    torch.ao.nn.sparse.quantized.dynamic.linear Linear
    torch.ao.nn.sparse.quantized.linear LinearPackedParams Linear
    torch.ao.nn.sparse.quantized.utils LinearBlockSparsePattern
    torch.ao.quantization.observer ObserverBase UniformQuantizationObserverBase MinMaxObserver
    MovingAverageMinMaxObserver PerChannelMinMaxObserver MovingAveragePerChannelMinMaxObserver
    HistogramObserver FixedQParamsObserver PlaceholderObserver RecordingObserver NoopObserver
    ReuseInputObserver MappingType ZeroPointDomain TorchAODType Granularity PerBlock PerTensor
    PerAxis PerGroup PerRow PerToken AffineQuantizedObserverBase
    torch.ao.quantization.fake_quantize FakeQuantizeBase FakeQuantize FixedQParamsFakeQuantize
    FusedMovingAvgObsFakeQuantize
    torch.ao.quantization.qconfig QConfig QConfigDynamic
    torch.ao.quantization.stubs QuantStub DeQuantStub QuantWrapper
    torch.ao.quantization.quant_type QuantType
    torch.optim Adafactor Muon
    torch.optim._adafactor Adafactor
    torch.optim._muon Muon
    torch.optim.adadelta Adadelta
    torch.optim.adagrad Adagrad
    torch.optim.adam Adam
    torch.optim.adamax Adamax
    torch.optim.adamw AdamW
    torch.optim.asgd ASGD
    torch.optim.lbfgs LBFGS
    torch.optim.lr_scheduler LRScheduler _LRScheduler LambdaLR MultiplicativeLR StepLR MultiStepLR
    ConstantLR LinearLR ExponentialLR SequentialLR PolynomialLR CosineAnnealingLR ChainedScheduler
    ReduceLROnPlateau CyclicLR CosineAnnealingWarmRestarts _SchedulePhase OneCycleLR
    torch.optim.nadam NAdam
    torch.optim.optimizer Optimizer
    torch.optim.radam RAdam
    torch.optim.rmsprop RMSprop
    torch.optim.rprop Rprop
    torch.optim.sgd SGD
    torch.optim.sparse_adam SparseAdam
    torch.optim.swa_utils AveragedModel SWALR
    torch.distributed.optim.zero_redundancy_optimizer ZeroRedundancyOptimizer
    torch.distributed.optim.post_localSGD_optimizer PostLocalSGDOptimizer
    torch.distributed._shard.metadata ShardMetadata
    torch.distributed._shard.sharded_tensor.api ShardedTensorBase ShardedTensor
    torch.distributed._shard.sharded_tensor.metadata MEM_FORMAT_ENCODING TensorProperties
    ShardedTensorMetadata
    torch.distributed._shard.sharded_tensor.shard Shard
    torch.distributed._shard.sharding_spec.api PlacementSpec DevicePlacementSpec ShardingSpec
    EnumerableShardingSpec
    torch.distributed._shard.sharding_spec.chunk_sharding_spec ChunkShardingSpec
    torch.distributed.checkpoint.metadata ChunkStorageMetadata _MEM_FORMAT_ENCODING TensorProperties
    TensorStorageMetadata BytesStorageMetadata StorageMeta Metadata MetadataIndex
    torch.distributed.checkpoint.state_dict StateDictOptions _EXTRA_STATE
    torch.distributed.checkpoint.planner WriteItemType LoadItemType BytesIOWriteData TensorWriteData
    WriteItem ReadItem SavePlan LoadPlan
    torch.distributed.checkpoint.filesystem _StorageInfo _StoragePrefix SerializationFormat
    torch.distributed.device_mesh DeviceMesh
    torch.distributed._mesh_layout _FlatLayout _MeshLayout
    torch.distributed.remote_device _remote_device
    torch.distributed.fsdp CPUOffloadPolicy MixedPrecisionPolicy OffloadPolicy
    torch.distributed.fsdp.api ShardingStrategy BackwardPrefetch MixedPrecision CPUOffload
    StateDictType StateDictConfig FullStateDictConfig LocalStateDictConfig ShardedStateDictConfig
    OptimStateDictConfig FullOptimStateDictConfig LocalOptimStateDictConfig
    ShardedOptimStateDictConfig StateDictSettings
    torch.distributed.fsdp.fully_sharded_data_parallel OptimStateKeyType FullyShardedDataParallel
    torch.distributed.fsdp.wrap ModuleWrapPolicy CustomPolicy
    torch.distributed.fsdp._flat_param HandleShardingStrategy ParamInfo SharedParamInfo
    _ShardParamInfo FlatParamShardMetadata FlatParameter
    torch.distributed.fsdp._fully_shard._fsdp_api MixedPrecisionPolicy OffloadPolicy
    CPUOffloadPolicy
    torch.distributed.fsdp.sharded_grad_scaler ShardedGradScaler
    torch.distributed.tensor._api DTensor
    torch.distributed.tensor DTensor Shard Replicate Partial
    torch.distributed.tensor._dtensor_spec TensorMeta DTensorSpec ShardOrderEntry
    torch.distributed.tensor.placement_types _StridedShardOffsetMode Shard _StridedShard Replicate
    Partial _MaskPartial DTensorSpec TensorMeta _Partial
    torch.distributed.tensor._shards_wrapper LocalShardsWrapper
    torch.distributed.tensor._ops._mask_buffer MaskBuffer
    torch.distributed.tensor._ops._embedding_ops _MaskPartial MaskBuffer
    torch.distributed.tensor._ops._math_ops _NormPartial NormReduction
    torch.distributed._tensor.api DTensor
    torch.distributed._tensor.placement_types _StridedShardOffsetMode Shard _StridedShard Replicate
    Partial _MaskPartial DTensorSpec TensorMeta _Partial
    torch.distributed._tensor.device_mesh DeviceMesh
    torch.distributed._tensor._dtensor_spec TensorMeta DTensorSpec
    torch.distributed._sharded_tensor.api ShardedTensorBase ShardedTensor
    torch.distributed._sharded_tensor.metadata MEM_FORMAT_ENCODING TensorProperties
    ShardedTensorMetadata
    torch.distributed._sharded_tensor.shard Shard
    torch.distributed.algorithms._checkpoint.checkpoint_wrapper CheckpointImpl CheckpointWrapper
    OffloadWrapper
    torch.amp.grad_scaler GradScaler OptState
    torch.cuda.amp.grad_scaler GradScaler OptState
    torch.distributions.bernoulli Bernoulli
    torch.distributions.beta Beta
    torch.distributions.binomial Binomial
    torch.distributions.categorical Categorical
    torch.distributions.cauchy Cauchy
    torch.distributions.chi2 Chi2
    torch.distributions.constraints Constraint _Dependent _DependentProperty _IndependentConstraint
    MixtureSameFamilyConstraint _Boolean _OneHot _IntegerInterval _IntegerLessThan
    _IntegerGreaterThan _Real _GreaterThan _GreaterThanEq _LessThan _Interval _HalfOpenInterval
    _Simplex _Multinomial _LowerTriangular _LowerCholesky _CorrCholesky _Square _Symmetric
    _PositiveSemidefinite _PositiveDefinite _Cat _Stack
    torch.distributions.continuous_bernoulli ContinuousBernoulli
    torch.distributions.dirichlet _Dirichlet Dirichlet
    torch.distributions.distribution Distribution
    torch.distributions.exp_family ExponentialFamily
    torch.distributions.exponential Exponential
    torch.distributions.fishersnedecor FisherSnedecor
    torch.distributions.gamma Gamma
    torch.distributions.generalized_pareto GeneralizedPareto
    torch.distributions.geometric Geometric
    torch.distributions.gumbel Gumbel
    torch.distributions.half_cauchy HalfCauchy
    torch.distributions.half_normal HalfNormal
    torch.distributions.independent Independent
    torch.distributions.inverse_gamma InverseGamma
    torch.distributions.kumaraswamy Kumaraswamy
    torch.distributions.laplace Laplace
    torch.distributions.lkj_cholesky LKJCholesky
    torch.distributions.log_normal LogNormal
    torch.distributions.logistic_normal LogisticNormal
    torch.distributions.lowrank_multivariate_normal LowRankMultivariateNormal
    torch.distributions.mixture_same_family MixtureSameFamily
    torch.distributions.multinomial Multinomial
    torch.distributions.multivariate_normal MultivariateNormal
    torch.distributions.negative_binomial NegativeBinomial
    torch.distributions.normal Normal
    torch.distributions.one_hot_categorical OneHotCategorical OneHotCategoricalStraightThrough
    torch.distributions.pareto Pareto
    torch.distributions.poisson Poisson
    torch.distributions.relaxed_bernoulli LogitRelaxedBernoulli RelaxedBernoulli
    torch.distributions.relaxed_categorical ExpRelaxedCategorical RelaxedOneHotCategorical
    torch.distributions.studentT StudentT
    torch.distributions.transformed_distribution TransformedDistribution
    torch.distributions.transforms Transform _InverseTransform ComposeTransform IndependentTransform
    ReshapeTransform ExpTransform PowerTransform SigmoidTransform SoftplusTransform TanhTransform
    AbsTransform AffineTransform CorrCholeskyTransform SoftmaxTransform StickBreakingTransform
    LowerCholeskyTransform PositiveDefiniteTransform CatTransform StackTransform
    CumulativeDistributionTransform
    torch.distributions.uniform Uniform
    torch.distributions.von_mises VonMises
    torch.distributions.weibull Weibull
    torch.distributions.wishart Wishart
    torch.utils.data.dataset Dataset IterableDataset TensorDataset StackDataset ConcatDataset
    ChainDataset Subset
    torch.utils.data.sampler Sampler SequentialSampler RandomSampler SubsetRandomSampler
    WeightedRandomSampler BatchSampler
    torch.utils.data.distributed DistributedSampler
    torch.utils.hooks RemovableHandle
    torch.torch_version TorchVersion
"""
"""Modules, each with the classes that it defines: a word with a dot is a module."""


def _classes() -> frozenset[str]:
    found, module = set(), ""
    for word in _CLASSES.split():
        if "." in word:
            module = word
        else:
            found.add(f"{module}.{word}")
    return frozenset(found)


TORCH_CLASSES = _classes()
