#!/bin/bash
# compiler.sh [PACKAGE]: what torch.compile needs: C and C++ compilers and the package of Python's headers, without
# link-time optimization, sanitizers, static libraries and profilers. It depends on the base alone: one layer for all
# images (docs/decisions/0014).
set -Eeuo pipefail
. /tmp/apt.sh
install_packages g++ "$@"
# Small archives stay: programs name them with -lpthread and -ldl, and they are empty since glibc 2.34.
find /usr/lib/gcc /usr/lib/*-linux-gnu -name '*.a' -size +64k ! -name 'libgcc*.a' -delete
rm -rf /usr/lib*/gcc/*/*/lto1 /usr/bin/*lto-dump* /usr/bin/*gcov*
rm -rf /usr/bin/*gprof* /usr/bin/{,*-}gp-* /usr/lib/*/gprofng /usr/lib/*/libgprofng*
rm -rf /usr/lib/gcc/*/*/lib*san* /usr/lib/*/lib{a,hwa,l,t,ub}san.so* /usr/lib/python3*/config-*
settle
