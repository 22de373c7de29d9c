# The two images, for those who build with a container engine. CI does not build this file: it makes
# and runs the same images with `cargo xtask image`.
#
#   docker build --target holdfast-agent -t localhost/holdfast-agent:0.1.0 .
#   docker build --target holdfast-sdp   -t localhost/holdfast-sdp:0.1.0 .

FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --locked --release -p holdfast-agent -p holdfast-sdp --bins
# Static: the plugin runs on the node itself, whose C library may be another one.
RUN RUSTFLAGS="-C target-feature=+crt-static" cargo build --locked --release \
      --target x86_64-unknown-linux-gnu -p holdfast-cni --bins
RUN cargo xtask licences holdfast-agent /out/holdfast-agent.doc \
 && cargo xtask licences holdfast-sdp /out/holdfast-sdp.doc
RUN strip -o /out/holdfast-agent target/release/holdfast-agent \
 && strip -o /out/holdfast-sdp target/release/holdfast-sdp \
 && strip -o /out/holdfast-cni target/x86_64-unknown-linux-gnu/release/holdfast-cni

FROM gcr.io/distroless/cc-debian12 AS holdfast-agent
COPY --from=build /out/holdfast-agent.doc /usr/share/doc/holdfast
COPY --from=build /out/holdfast-agent /out/holdfast-cni /usr/local/bin/
ENV PATH=/usr/local/bin
USER 0:0
ENTRYPOINT ["/usr/local/bin/holdfast-agent"]

FROM gcr.io/distroless/cc-debian12 AS holdfast-sdp
COPY --from=build /out/holdfast-sdp.doc /usr/share/doc/holdfast
COPY --from=build /out/holdfast-sdp /usr/local/bin/
ENV PATH=/usr/local/bin
USER 0:0
ENTRYPOINT ["/usr/local/bin/holdfast-sdp"]
