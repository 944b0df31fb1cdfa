"""Names that are known: those that ordinary checkpoints hold, and the packages that are wherever a
checkpoint is loaded.

What torch itself accepts with `weights_only=True` stands in `torch_names`, its other classes in
`torch_classes`. Sources: the source of torch and of numpy, `sys.stdlib_module_names` of Python 3.10
to 3.13, the libraries of 2.7 and 3.6 to 3.9, and the names in the documentation of 3.14. `test` and
`lib` are left out: many projects have a folder of that name.
"""

from __future__ import annotations

from ckptconv.objects.torch_classes import TORCH_CLASSES
from ckptconv.objects.torch_names import WEIGHTS_ONLY

_STANDARD_LIBRARY = """
    BaseHTTPServer CGIHTTPServer ConfigParser Cookie Dialog DocXMLRPCServer FileDialog FixTk
    HTMLParser MimeWriter Queue ScrolledText SimpleDialog SimpleHTTPServer SimpleXMLRPCServer
    SocketServer StringIO Tix Tkconstants Tkdnd Tkinter UserDict UserList UserString _LWPCookieJar
    _MozillaCookieJar __builtin__ __future__ __hello__ __phello__ _abc _abcoll _aix_support
    _android_support _apple_support _ast _ast_unparse _asyncio _bisect _blake2 _bootlocale
    _bootsubprocess _bsddb _bz2 _codecs _codecs_cn _codecs_hk _codecs_iso2022 _codecs_jp _codecs_kr
    _codecs_tw _collections _collections_abc _colorize _compat_pickle _compression _contextvars
    _crypt _csv _ctypes _ctypes_test _curses _curses_panel _datetime _dbm _decimal _dummy_thread
    _elementtree _frozen_importlib _frozen_importlib_external _functools _gdbm _hashlib _heapq _hmac
    _hotshot _imp _interpchannels _interpqueues _interpreters _io _ios_support _json _locale _lsprof
    _lzma _markupbase _md5 _msi _multibytecodec _multiprocessing _opcode _opcode_metadata _operator
    _osx_support _overlapped _peg_parser _pickle _posixshmem _posixsubprocess _py_abc _py_warnings
    _pydatetime _pydecimal _pyio _pylong _pyrepl _queue _random _remote_debugging _scproxy _sha
    _sha1 _sha2 _sha256 _sha3 _sha512 _signal _sitebuiltins _socket _sqlite3 _sre _ssl _stat
    _statistics _string _strptime _struct _suggestions _symtable _sysconfig _testbuffer _testcapi
    _testclinic _testclinic_limited _testexternalinspection _testimportmultiple _testinternalcapi
    _testlimitedcapi _testmultiphase _testsinglephase _thread _threading_local _tkinter _tokenize
    _tracemalloc _types _typing _uuid _warnings _weakref _weakrefset _winapi _winreg _wmi
    _xxinterpchannels _xxsubinterpreters _xxtestfuzz _zoneinfo _zstd abc aifc annotationlib
    antigravity anydbm argparse array ast asynchat asyncio asyncore atexit audiodev audioop base64
    bdb binascii binhex bisect bsddb builtins bz2 cPickle cProfile cStringIO calendar cgi cgitb
    chunk cmath cmd code codecs codeop collections colorsys commands compileall compiler compression
    concurrent configparser contextlib contextvars cookielib copy copy_reg copyreg crypt csv ctypes
    curses dataclasses datetime dbhash dbm decimal difflib dircache dis distutils doctest dumbdbm
    dummy_thread dummy_threading email encodings ensurepip enum errno exceptions faulthandler fcntl
    filecmp fileinput fnmatch formatter fractions ftplib functools future_builtins gc gdbm
    genericpath getopt getpass gettext glob graphlib grp gzip hashlib heapq hmac hotshot html
    htmlentitydefs htmllib http httplib idlelib ihooks imageop imaplib imghdr imp importlib imputil
    inspect io ipaddress itertools json keyword lib2to3 linecache locale logging lzma macpath
    macurl2path mailbox mailcap markupbase marshal math md5 mhlib mimetools mimetypes mimify mmap
    modulefinder msilib msvcrt multifile multiprocessing mutex netrc new nis nntplib nt ntpath
    nturl2path numbers opcode operator optparse os os2emxpath ossaudiodev parser pathlib pdb pickle
    pickletools pipes pkgutil platform plistlib popen2 poplib posix posixfile posixpath pprint
    profile pstats pty pwd py_compile pyclbr pydoc pydoc_data pyexpat queue quopri random re
    readline repr reprlib resource rexec rfc822 rlcompleter robotparser runpy sched secrets select
    selectors sets sgmllib sha shelve shlex shutil signal site smtpd smtplib sndhdr socket
    socketserver spwd sqlite3 sre sre_compile sre_constants sre_parse ssl stat statistics statvfs
    string stringold stringprep strop struct subprocess sunau sunaudio symbol symtable sys sysconfig
    syslog tabnanny tarfile telnetlib tempfile termios textwrap this thread threading time timeit
    tkColorChooser tkCommonDialog tkFileDialog tkFont tkMessageBox tkSimpleDialog tkinter toaiff
    token tokenize tomllib trace traceback tracemalloc ttk tty turtle turtledemo types typing
    unicodedata unittest urllib urllib2 urlparse user uu uuid venv warnings wave weakref webbrowser
    whichdb winreg winsound wsgiref xdrlib xml xmllib xmlrpc xmlrpclib xxlimited xxsubtype zipapp
    zipfile zipimport zlib zoneinfo
"""
ALWAYS_THERE = frozenset(_STANDARD_LIBRARY.split()) | {
    "torch",
    "functorch",
    "torchgen",
    "caffe2",
    "numpy",
}
"""The top modules of what every victim has: Python's own library, old and new, torch and numpy."""

_MAKERS = """
    builtins.set builtins.frozenset builtins.list builtins.dict builtins.tuple builtins.int
    builtins.float builtins.bool builtins.str builtins.bytes builtins.bytearray builtins.complex
    builtins.slice builtins.range builtins.object __builtin__.long __builtin__.unicode
    __builtin__.xrange collections.OrderedDict collections.defaultdict collections.deque
    collections.Counter collections.ChainMap collections.UserDict collections.UserList
    collections.UserString
    copyreg._reconstructor copyreg.__newobj__ copyreg.__newobj_ex__ argparse.Namespace
    types.SimpleNamespace datetime.datetime datetime.date datetime.time datetime.timedelta
    datetime.timezone decimal.Decimal fractions.Fraction uuid.UUID enum.auto logging.Logger
    random.Random
    pathlib.Path pathlib.PosixPath pathlib.WindowsPath pathlib.PurePath pathlib.PurePosixPath
    pathlib.PureWindowsPath pathlib._local.Path pathlib._local.PosixPath pathlib._local.WindowsPath
    pathlib._local.PurePath pathlib._local.PurePosixPath pathlib._local.PureWindowsPath
    array._array_reconstructor array.array
    numpy._core.multiarray._reconstruct numpy._core.multiarray.scalar
    numpy._core.numeric._frombuffer numpy.ndarray numpy.dtype numpy.matrix
    numpy.matrixlib.defmatrix.matrix numpy.recarray numpy.record numpy._core.records.recarray
    numpy._core.records.record numpy.rec.recarray numpy.rec.record numpy.ma.core._mareconstruct
    numpy.ma.core.MaskedArray numpy.ma.MaskedArray numpy.random.RandomState
    numpy.random.mtrand.RandomState numpy.random.__RandomState_ctor
    numpy.random._pickle.__randomstate_ctor numpy.random._pickle.__generator_ctor
    numpy.random._pickle.__bit_generator_ctor numpy.random._generator.Generator
    numpy.random._mt19937.MT19937 numpy.random._pcg64.PCG64 numpy.random._pcg64.PCG64DXSM
    numpy.random._philox.Philox numpy.random._sfc64.SFC64 numpy.random.bit_generator.SeedSequence
    numpy.random.bit_generator.__pyx_unpickle_SeedSequence
    torch.Generator torch._C.Generator torch.nn.Module torch.autograd.Variable
    torch.autograd.variable.Variable torch._utils._rebuild_xla_tensor
    torch._utils._rebuild_device_tensor_from_numpy torch._utils._rebuild_sparse_csr_tensor
    torch._utils._rebuild_mlc_tensor torch._tensor._rebuild_from_type
    torch.tensor._rebuild_from_type
    torch.storage._TypedStorage torch.storage._UntypedStorage torch._UntypedStorage
    torch._TypedStorage torch.TypedStorage torch.UntypedStorage torch.cuda.TypedStorage
    torch.cuda.UntypedStorage
"""
_FINDERS = """
    builtins.Ellipsis builtins.NotImplemented logging.getLogger _codecs.encode re._compile
    torch.storage._load_from_bytes torch.dtype torch.layout torch.memory_format torch.strided
    torch.sparse_coo torch.contiguous_format torch.preserve_format torch.channels_last
    torch.channels_last_3d torch.nn.backends.thnn._get_thnn_function_backend
    torch.optim.lr_scheduler.OneCycleLR._annealing_cos
    torch.optim.lr_scheduler.OneCycleLR._annealing_linear
    torch.optim.lr_scheduler.CyclicLR._triangular_scale_fn
    torch.optim.lr_scheduler.CyclicLR._triangular2_scale_fn
    torch.optim.lr_scheduler.CyclicLR._exp_range_scale_fn torch._C._VariableFunctionsClass
    torch._C._VariableFunctions
    torch.jit._pickle.build_intlist torch.jit._pickle.build_tensorlist
    torch.jit._pickle.build_doublelist torch.jit._pickle.build_boollist
    torch.jit._pickle.build_tensor_from_id torch.jit._pickle.restore_type_tag typing.Any
    typing.Union typing.Optional typing.List typing.Dict typing.Tuple typing.Set typing.FrozenSet
    typing.Sequence typing.Mapping typing.Iterable typing.Callable typing.Type typing.Literal
"""
_ENUMS = """
    torch.nn.utils.parametrizations._OrthMaps torch.ao.quantization.observer.MappingType
    torch.ao.quantization.observer.ZeroPointDomain torch.ao.quantization.observer.TorchAODType
    torch.ao.quantization.quant_type.QuantType
    torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING
    torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    torch.distributed.checkpoint.planner.WriteItemType
    torch.distributed.checkpoint.planner.LoadItemType
    torch.distributed.checkpoint.filesystem.SerializationFormat
    torch.distributed.fsdp.api.ShardingStrategy torch.distributed.fsdp.api.BackwardPrefetch
    torch.distributed.fsdp.api.StateDictType
    torch.distributed.fsdp.fully_sharded_data_parallel.OptimStateKeyType
    torch.distributed.fsdp._flat_param.HandleShardingStrategy
    torch.distributed.tensor.placement_types._StridedShardOffsetMode
    torch.distributed._sharded_tensor.metadata.MEM_FORMAT_ENCODING
    torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointImpl
    torch.amp.grad_scaler.OptState torch.cuda.amp.grad_scaler.OptState uuid.SafeUUID
"""
_NUMPY_SCALARS = """
    bool_ bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 intc uintc intp uintp longlong
    ulonglong float16 float32 float64 float128 longdouble complex64 complex128 complex256
    clongdouble str_ bytes_ void object_ datetime64 timedelta64 string_ unicode_ float_ int_ half
    single double
"""
_NUMPY_DTYPES = """
    Bool Int8 Int16 Int32 Int64 UInt8 UInt16 UInt32 UInt64 Int UInt LongLong ULongLong Float16
    Float32 Float64 LongDouble Complex64 Complex128 CLongDouble Object Bytes Str Void DateTime64
    TimeDelta64
"""
_FUNCTIONS = """
    relu relu6 elu selu celu leaky_relu prelu rrelu glu gelu logsigmoid hardshrink tanhshrink
    softsign softplus softmin softmax softshrink log_softmax tanh sigmoid hardtanh hardsigmoid
    hardswish silu mish threshold normalize dropout layer_norm group_norm batch_norm linear
    cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
    binary_cross_entropy_with_logits kl_div cosine_similarity interpolate pad one_hot max_pool1d
    max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d gumbel_softmax scaled_dot_product_attention sin cos exp log sqrt abs square
    identity
"""
_INITIALIZERS = """
    uniform_ normal_ trunc_normal_ constant_ ones_ zeros_ eye_ dirac_ xavier_uniform_ xavier_normal_
    kaiming_uniform_ kaiming_normal_ orthogonal_ sparse_
"""
_HOLDERS = (
    "torch.nn.functional",
    "torch._C._nn",
    "torch._C._VariableFunctions",
    "torch._C._VariableFunctionsClass",
)
"""Where the functions stand that modules keep as their activation, as `pickle` names them."""
_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")


SINGLE = frozenset(_ENUMS.split())
"""Classes that have a few objects, which a call finds."""
MAKERS = (
    (
        frozenset(_MAKERS.split())
        | WEIGHTS_ONLY
        | TORCH_CLASSES
        | {f"numpy.{name}" for name in _NUMPY_SCALARS.split()}
        | {f"numpy.dtypes.{name}DType" for name in _NUMPY_DTYPES.split()}
    )
    - SINGLE
    - {"_codecs.encode", "torch.serialization._get_layout"}
)
"""Classes, and functions that make an object: what they give is there for the first time."""
PLAIN = (
    MAKERS
    | SINGLE
    | WEIGHTS_ONLY
    | frozenset(_FINDERS.split())
    | {f"{holder}.{name}" for holder in _HOLDERS for name in _FUNCTIONS.split()}
    | {f"torch.nn.init.{name}" for name in _INITIALIZERS.split()}
    | {f"torch._utils.torch.{name}" for name in _FORMATS}
)
"""The names of ordinary checkpoints, in the words of Python 3 (or of python 2, if only there)."""
