"""Which distribution provides a module: for repositories whose requirements are nowhere written down.

An unknown name is not guessed: a distribution of the same name may be another's, or malicious.
"""

from __future__ import annotations

from trainyard.workspace.framework_table import table

#: Module -> distribution of another name, as https://github.com/bndr/pipreqs/blob/master/pipreqs/mapping has them, in
#: today's spelling; cv2 without the libraries of a desktop (https://github.com/opencv/opencv-python#installation-and-usage).
_OTHER_NAMES = {
    "Crypto": "pycryptodome",
    "IPython": "ipython",
    "Levenshtein": "levenshtein",
    "OpenSSL": "pyopenssl",
    "PIL": "pillow",
    "absl": "absl-py",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "gin": "gin-config",
    "git": "gitpython",
    "googleapiclient": "google-api-python-client",
    "haiku": "dm-haiku",
    "hydra": "hydra-core",
    "ignite": "pytorch-ignite",
    "lightning_fabric": "lightning-fabric",
    "magic": "python-magic",
    "mpl_toolkits": "matplotlib",
    "open_clip": "open-clip-torch",
    "orbax": "orbax-checkpoint",
    "pkg_resources": "setuptools<82",
    "pyro": "pyro-ppl",
    "pytorch_lightning": "pytorch-lightning",
    "ruamel": "ruamel.yaml",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "skopt": "scikit-optimize",
    "sonnet": "dm-sonnet",
    "tensorflow_addons": "tensorflow-addons",
    "tensorflow_datasets": "tensorflow-datasets",
    "tensorflow_hub": "tensorflow-hub",
    "tensorflow_probability": "tensorflow-probability",
    "torch_geometric": "torch-geometric",
    "torch_tpu": "torch-tpu",
    "torch_xla": "torch-xla",
    "umap": "umap-learn",
    "whisper": "openai-whisper",
    "yaml": "pyyaml",
}

_WELL_KNOWN = """
accelerate aiohttp albumentations av bitsandbytes boto3 braceexpand click cloudpickle colorama coloredlogs
configargparse datasets deepspeed diffusers dill easydict einops ema_pytorch evaluate fastai filelock fire fsspec ftfy
fvcore gcsfs gensim gymnasium h5py hdf5plugin httpx huggingface_hub imageio imgaug iopath jax jinja2 joblib
jsonargparse jsonlines jsonschema kagglehub keras kornia librosa lightgbm lightning lightning_utilities lmdb loguru
lxml matplotlib mlflow monai more_itertools msgpack munch natsort networkx nibabel nltk numba numpy omegaconf onnx
onnxruntime onnxscript openpyxl optax optuna orjson packaging pandas peft plotly polars prettytable prodigyopt psutil
pyarrow pycocotools pydantic pydicom pytest ray rdkit regex requests rich sacrebleu safetensors schedulefree scipy
seaborn sentencepiece setproctitle shapely simplejson six smart_open soundfile spacy statsmodels submitit sympy
tabulate tensorboard tensorboardX tensorflow termcolor tf_keras tiktoken timm tokenizers toml tomli torch torchao
torchaudio torchdata torcheval torchinfo torchmetrics torchsummary torchtext torchvision tqdm transformers treelib trl
typer typing_extensions tyro ujson unidecode visdom wandb webdataset wget xarray xformers xgboost yacs zarr zstandard
"""

#: Well-known modules whose distributions have their name.
_SAME_NAME = frozenset(_WELL_KNOWN.split())


def distribution(module: str) -> str | None:
    """The distribution that provides a top-level module; None if it is not known."""
    if module in _OTHER_NAMES:
        return _OTHER_NAMES[module]
    name = module.lower().replace("_", "-")
    return name if module in _SAME_NAME or name in table().packages else None
