"""Which distribution provides a module: for repositories whose requirements are nowhere written down.

An unknown name is not guessed: a distribution of the same name may be another's, or malicious.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from packaging.utils import canonicalize_name

from trainyard.workspace.framework_table import table

#: Module -> distributions of other names that provide it, as https://github.com/bndr/pipreqs/blob/master/pipreqs/mapping
#: has them, in today's spelling. The first is proposed: cv2 without the libraries of a desktop
#: (https://github.com/opencv/opencv-python#installation-and-usage).
_OTHER_NAMES = {
    "Crypto": "pycryptodome pycrypto",
    "Levenshtein": "levenshtein python-levenshtein",
    "OpenSSL": "pyopenssl",
    "PIL": "pillow",
    "absl": "absl-py",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless opencv-python opencv-contrib-python",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu faiss-gpu",
    "gin": "gin-config",
    "git": "gitpython",
    "google.cloud.storage": "google-cloud-storage",
    "google.protobuf": "protobuf",
    "googleapiclient": "google-api-python-client",
    "haiku": "dm-haiku",
    "hydra": "hydra-core",
    "ignite": "pytorch-ignite",
    "imblearn": "imbalanced-learn",
    "magic": "python-magic",
    "mpl_toolkits": "matplotlib",
    "open_clip": "open-clip-torch",
    "orbax": "orbax-checkpoint orbax-export",
    "pkg_resources": "setuptools<82",
    "pynvml": "nvidia-ml-py pynvml",
    "pyro": "pyro-ppl",
    "pywt": "pywavelets",
    "ruamel": "ruamel.yaml",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "sklearnex": "scikit-learn-intelex",
    "skopt": "scikit-optimize",
    "sonnet": "dm-sonnet",
    "tensorflow_datasets": "tensorflow-datasets tfds-nightly",
    "tensorflow_hub": "tensorflow-hub tf-hub-nightly",
    "tensorflow_probability": "tensorflow-probability tfp-nightly",
    "umap": "umap-learn",
    "whisper": "openai-whisper",
    "yaml": "pyyaml",
}

_WELL_KNOWN = """
IPython accelerate aiohttp albumentations av bitsandbytes boto3 braceexpand click cloudpickle colorama coloredlogs
configargparse datasets deepspeed diffusers dill easydict einops ema_pytorch evaluate fastai filelock fire fsspec ftfy
fvcore gcsfs gensim gymnasium h5py hdf5plugin httpx huggingface_hub imageio imgaug iopath jax jinja2 joblib
jsonargparse jsonlines jsonschema kagglehub keras kornia librosa lightgbm lightning lightning_fabric
lightning_utilities lmdb loguru lxml matplotlib mlflow monai more_itertools msgpack munch natsort networkx nibabel
nltk numba numpy omegaconf onnx onnxruntime onnxscript openpyxl optax optuna orjson packaging pandas peft plotly
polars prettytable prodigyopt psutil pyarrow pycocotools pydantic pydicom pytest ray rdkit regex requests rich
sacrebleu safetensors schedulefree scipy seaborn sentencepiece setproctitle shapely simplejson six smart_open
soundfile spacy statsmodels submitit sympy tabulate tensorboard tensorboardX tensorflow termcolor tf_keras tiktoken
timm tokenizers toml tomli torch torchao torchaudio torchdata torcheval torchinfo torchmetrics torchsummary torchtext
torch_tpu torch_xla torchvision tqdm transformers treelib trl typer typing_extensions tyro ujson unidecode visdom
wandb webdataset wget xarray xformers xgboost yacs zarr zstandard
"""

#: Well-known modules whose distributions have their name.
_SAME_NAME = frozenset(_WELL_KNOWN.split())


def root(module: str) -> str:
    """Return the part of a module's name that tells the distribution: the top-level module, or ``google.protobuf``."""
    parts = module.split(".")
    return next((name for end in (3, 2) if (name := ".".join(parts[:end])) in _OTHER_NAMES), parts[0])


def providers(module: str) -> list[str]:
    """Return the distributions that are known to provide a module, the one to propose first."""
    module = root(module)
    name = module.lower().replace("_", "-")
    same = module in _SAME_NAME or name in table().packages
    return _OTHER_NAMES.get(module, name if same else "").split()


def is_provided(module: str, known: Container[str], listed: Iterable[str]) -> bool:
    """Return whether a distribution of ``known``, or a build of ``listed`` such as faiss-gpu-cu12, has a module."""
    top = canonicalize_name(module.partition(".")[0])
    names = [canonicalize_name(name) for name in providers(module)]
    builds = tuple(f"{name}-" for name in names or [top])
    return any(name in known for name in [*names, top]) or any(name.startswith(builds) for name in listed)


def is_similar(module: str, listed: Iterable[str]) -> bool:
    """Return whether the name of a listed distribution has that of a module in it, as python-docx has docx."""
    return any(module.lower().replace("_", "") in name.replace("-", "") for name in listed)
