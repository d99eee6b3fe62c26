#!/bin/sh
# What a TPU VM does when it boots, as far as ssh is concerned.
set -eu
ssh-keygen -q -A
mkdir -p /run/sshd
exec /usr/sbin/sshd -D -e -o UseDNS=no -o LogLevel=ERROR
