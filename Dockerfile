# The two images, for those who build with a container engine. CI does not build this file: it makes
# and runs the same images with `cargo xtask image`.
#
#   export SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)   # the date in the lists of components
#   docker build --target holdfast-agent -t localhost/holdfast-agent:0.1.0 .
#   docker build --target holdfast-sdp   -t localhost/holdfast-sdp:0.1.0 .
#   docker build --target sbom -o sbom .                  # the lists of components alone
#
# The bases are pinned by the digests of their indexes of platforms. This prints the one that a tag
# has today:
#
#   docker buildx imagetools inspect gcr.io/distroless/cc-debian12 --format '{{.Manifest.Digest}}'
#
# Debian's security updates of the C library arrive with a new digest only.

FROM gcr.io/distroless/cc-debian12:latest@sha256:e5d81ddde149641e2a9ba55be4545bc125c67de07508b03ba4c22e6eb0ded5aa AS base

FROM rust:1.95-bookworm@sha256:6258907abe69656e41cd992e0b705cdcfabcbbe3db374f92ed2d47121282d4a1 AS build
WORKDIR /src
COPY . .
RUN cargo build --locked --release -p holdfast-agent -p holdfast-sdp --bins
# Static: the plugin runs on the node itself, whose C library may be another one.
RUN RUSTFLAGS="-C target-feature=+crt-static" cargo build --locked --release \
      --target x86_64-unknown-linux-gnu -p holdfast-cni --bins
# What each image has in the end, so that its licences and components can be listed.
COPY --from=base / /out/holdfast-agent/
COPY --from=base / /out/holdfast-sdp/
RUN mkdir -p /out/holdfast-agent/usr/local/bin /out/holdfast-sdp/usr/local/bin \
 && strip -o /out/holdfast-agent/usr/local/bin/holdfast-agent target/release/holdfast-agent \
 && strip -o /out/holdfast-sdp/usr/local/bin/holdfast-sdp target/release/holdfast-sdp \
 && strip -o /out/holdfast-agent/usr/local/bin/holdfast-cni \
      target/x86_64-unknown-linux-gnu/release/holdfast-cni
ARG SOURCE_DATE_EPOCH=0
RUN cargo xtask inventory holdfast-agent /out/holdfast-agent \
 && cargo xtask inventory holdfast-sdp /out/holdfast-sdp

FROM scratch AS sbom
COPY --from=build /out/holdfast-agent/usr/share/sbom /out/holdfast-sdp/usr/share/sbom /

FROM base AS holdfast-agent
COPY --from=build /out/holdfast-agent/usr/share/doc/holdfast /usr/share/doc/holdfast
COPY --from=build /out/holdfast-agent/usr/share/sbom /usr/share/sbom
COPY --from=build /out/holdfast-agent/usr/local/bin /usr/local/bin
ENV PATH=/usr/local/bin
USER 0:0
ENTRYPOINT ["/usr/local/bin/holdfast-agent"]

FROM base AS holdfast-sdp
COPY --from=build /out/holdfast-sdp/usr/share/doc/holdfast /usr/share/doc/holdfast
COPY --from=build /out/holdfast-sdp/usr/share/sbom /usr/share/sbom
COPY --from=build /out/holdfast-sdp/usr/local/bin /usr/local/bin
ENV PATH=/usr/local/bin
USER 0:0
ENTRYPOINT ["/usr/local/bin/holdfast-sdp"]
