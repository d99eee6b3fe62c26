# The CUDA compiler that a build requires is a wheel, which is unpacked into the folder of the framework's CUDA libraries:
# nvidia/cu13. That becomes the toolkit, but for the names that linkers look for, which wheels lack (libcudart.so).
for nvcc in /opt/venv/lib/python3*/site-packages/nvidia/cu*/bin/nvcc; do
  [ -x "$nvcc" ] || continue
  export CUDA_HOME="${CUDA_HOME:-${nvcc%/bin/nvcc}}" PATH="${nvcc%/nvcc}:$PATH"
  for library in "${nvcc%/bin/nvcc}"/lib/lib*.so.*; do
    [ -e "${library%.so.*}.so" ] || ln -s "${library##*/}" "${library%.so.*}.so"
  done
done
