#!/bin/sh
# Starts what it is given, with the cluster secret from a file where the environment does not have it.
set -eu
if [ -z "${BATON_CLUSTER_SECRET:-}" ] && [ -r "${BATON_CLUSTER_SECRET_FILE:-}" ]; then
  BATON_CLUSTER_SECRET=$(cat "$BATON_CLUSTER_SECRET_FILE")
  export BATON_CLUSTER_SECRET
fi
exec "$@"
